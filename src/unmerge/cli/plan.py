"""--dry-run: which layers, how much memory and how long, from a few batches."""

from __future__ import annotations

import itertools
import time
from typing import Any

from unmerge.cli.parts import batches_in
from unmerge.cli.work import Job, layer_choice
from unmerge.collection import collect
from unmerge.layers import candidates, select
from unmerge.statistics import Statistics
from unmerge.tables import text_table

_TIMED = 3  # batches
_MIB = 2**20


def show(job: Job) -> None:
    """Print the plan; nothing is written and the model is left as it is."""
    module, recipe = job.model.module, job.recipe
    few = list(itertools.islice(job.request.forget, _TIMED))
    edited = set(select(module, recipe.layers, recipe.skip_layers).names)
    collect(module, few[:1], **layer_choice(job), what="first batch")
    start = time.perf_counter()
    found = collect(module, few, **layer_choice(job), what="timing")
    a_batch = (time.perf_counter() - start) / len(few)
    counts = [batches_in(part) for part in (job.request.forget, job.request.retain)]
    passes = None if None in counts else a_batch * sum(count for count in counts if count is not None)
    modules = candidates(module)
    rows = [
        [
            name,
            type(modules[name]).__name__,
            str(tuple(modules[name].get_parameter("weight").shape)),
            "yes" if name in edited else "",
            f"{_bytes(found, [name]) / _MIB:.2f}",
        ]
        for name in found.layers
    ]
    size = _bytes(found, list(found.layers))
    output = job.output
    output.heading(job.request.description)
    output.show(text_table(["layer", "kind", "weight", "edited", "MiB"], rows))
    output.show(
        f"\nmemory: {3 * size / _MIB:.1f} MiB of statistics (forget, retain, all) beside the model; "
        f"{size / _MIB:.1f} MiB on disk"
    )
    if passes is None:
        output.show(f"time: {a_batch:.3f} s a batch; the loader does not say how many there are")
    else:
        output.show(
            f"time: about {passes:.1f} s for the pass over {counts[0]} + {counts[1]} batches, "
            "then the linear algebra and the curve"
        )
    output.result(
        {
            "request": job.request.description,
            "layers": {row[0]: {"kind": row[1], "weight": row[2], "edited": row[3] == "yes"} for row in rows},
            "statistics_bytes": size,
            "memory_bytes": 3 * size,
            "batches": counts,
            "seconds_a_batch": round(a_batch, 4),
            "seconds": None if passes is None else round(passes, 2),
        }
    )


def _bytes(found: Statistics, names: list[str]) -> int:
    """What the statistics of some layers take; layers that share their input share it."""
    distinct: dict[int, Any] = {id(found.layers[name]): found.layers[name] for name in names}
    return sum(
        layer.moments.gram.nbytes + layer.moments.total.nbytes + layer.class_sums.nbytes for layer in distinct.values()
    )
