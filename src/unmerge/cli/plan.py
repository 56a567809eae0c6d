"""--dry-run: which layers, how much memory and how long, from a few batches."""

from __future__ import annotations

import itertools
import time
from typing import Any

from unmerge.cli.parts import batches_in
from unmerge.cli.work import Job, check_init, layer_choice
from unmerge.collecting.collection import collect
from unmerge.collecting.statistics import Statistics
from unmerge.diagnosing.diagnosis import diagnose
from unmerge.errors import UnmergeError
from unmerge.model.layers import candidates
from unmerge.model.selection import select
from unmerge.requests.gathering import needed_of
from unmerge.tables import text_table

_TIMED = 3  # batches
_MIB = 2**20
_SETS = 4  # of statistics at one time: forget, retain, all, and a random draw for the verdict


def show(job: Job) -> None:
    """Print the plan; nothing is written and the model is left as it is."""
    module, recipe = job.model.module, job.recipe
    check_init(job)
    few = list(itertools.islice(job.request.forget, _TIMED))
    choice = {**layer_choice(job), "mask": job.request.mask}
    collect(module, few[:1], **choice, what="first batch")
    start = time.perf_counter()
    found = collect(module, few, **choice, what="timing")
    a_batch = (time.perf_counter() - start) / len(few)
    edited = set(select(module, recipe.layers, recipe.skip_layers, found.head).names)
    diagnosis = _diagnosis_seconds(job, few)
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
        f"\nmemory: {_SETS * size / _MIB:.1f} MiB of statistics (forget, retain, all, a random draw) beside the model; "
        f"{size / _MIB:.1f} MiB on disk"
    )
    if passes is None:
        passing = f"{a_batch:.3f} s a batch (the loader does not say how many there are)"
    else:
        passing = f"about {passes:.1f} s for the pass over {counts[0]} + {counts[1]} batches"
    diagnosing = "" if diagnosis is None else f", about {diagnosis:.1f} s for the diagnosis"
    output.show(f"time: {passing}{diagnosing}; then the edit and the curve")
    output.result(
        {
            "request": job.request.description,
            "layers": {row[0]: {"kind": row[1], "weight": row[2], "edited": row[3] == "yes"} for row in rows},
            "statistics_bytes": size,
            "memory_bytes": _SETS * size,
            "batches": counts,
            "seconds_a_batch": round(a_batch, 4),
            "seconds": None if passes is None else round(passes, 2),
            "seconds_diagnosis": None if diagnosis is None else round(diagnosis, 2),
        }
    )


def _diagnosis_seconds(job: Job, few: list[Any]) -> float | None:
    """The time of a diagnosis, from one layer of each size; None where a few batches say too little."""
    module, recipe = job.model.module, job.recipe
    mask = job.request.mask
    forget = collect(module, few, **layer_choice(job), **needed_of(recipe), mask=mask, what="timing")
    retain = collect(module, list(itertools.islice(job.request.retain, _TIMED)), forget, mask=mask, what="timing")
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, layer in forget.layers.items():
        alike.setdefault(tuple(layer.moments.gram.shape), []).append(name)
    seconds = 0.0
    for names in alike.values():
        one = names[0]
        start = time.perf_counter()
        try:
            diagnose(forget.only(one), retain.only(one), module, job.init, recipe=recipe.but(layers=[one]))
        except UnmergeError:  # the run has more to go by, and says what is wrong with it
            return None
        seconds += len(names) * (time.perf_counter() - start)
    return seconds


def _bytes(found: Statistics, names: list[str]) -> int:
    """What the statistics of some layers take; layers that share their input share it."""
    distinct: dict[int, Any] = {id(found.layers[name]): found.layers[name] for name in names}
    return sum(
        layer.moments.gram.nbytes + layer.moments.total.nbytes + layer.class_sums.nbytes for layer in distinct.values()
    )
