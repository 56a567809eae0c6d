"""`unmerge collect`: the statistics of a dataset, or of one shard of it, as a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli import models, requests
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.options import OverwriteFile
from unmerge.cli.parts import Part, Source
from unmerge.cli.recipes import names_in
from unmerge.cli.run_directory import check_file
from unmerge.collecting.collection import collect as collected
from unmerge.collecting.merging import Shard, save_shard
from unmerge.errors import DataError, suggest

KEPT = ("means", "full")
EXAMPLES = [
    "unmerge collect --model resnet --data images --out all.safetensors",
    "unmerge collect --model resnet --data images --shard 3/16 --out part3.safetensors   # one job of sixteen",
    "unmerge merge-stats part*.safetensors --out all.safetensors",
    "unmerge run --model resnet --data images --forget label=cat --statistics all.safetensors --out forget-cat",
]


def collect(
    output: Output,
    model: models.ModelOptions,
    data: requests.SourceOptions,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.")],
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Read every N-th sample only, from the I-th on: 1/N to N/N are all of them."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Layers to read, or re: patterns, separated by commas. By default all."),
    ] = None,
    per_class: Annotated[
        str, typer.Option(metavar="WORD", help="What is kept of each class: means, or full moments (cav-class).")
    ] = "means",
    overwrite: OverwriteFile = False,
) -> None:
    """Read data through a model once and keep the statistics that every later request starts from.

    With --shard the work is split over jobs that need not know of each other; unmerge merge-stats puts their files
    together.
    """
    if data.data is None:
        raise typer.BadParameter("say what to read: --data SRC.")
    if per_class not in KEPT:
        raise typer.BadParameter(f"--per-class {per_class!r}. {suggest(per_class, KEPT)}")
    number, total = _parsed(shard)
    check_file(out, overwrite)
    loaded = models.load(model.model, model.weights, model.device)
    batches, share = _share(requests.opened(data.data, data, loaded), data, Shard(number, total, "", per_class))
    found = collected(
        loaded.module,
        batches,
        None if layers is None else names_in(layers),
        per_class=per_class,
        mask=data.counted(),
        what="collect",
    )
    if share is None:
        found.save(out)
    else:
        save_shard(found, share, out)
    of = "" if share is None or share.total == 1 else f", shard {share}"
    output.show(f"{out}: {found.samples} samples, {len(found.layers)} layers{of}")
    output.result(
        {
            "out": str(out),
            "samples": found.samples,
            "layers": list(found.layers),
            "classes": dict(zip(map(str, found.classes), found.class_samples, strict=True)),
            "shard": None if share is None else str(share),
        }
    )


def _share(source: Any, data: requests.SourceOptions, asked: Shard) -> tuple[Any, Shard | None]:
    """The batches of a shard, and the shard with the checksum of its data where there is one."""
    if isinstance(source, Source) and source.identity is not None:
        share = Shard(asked.number, asked.total, source.identity, asked.per_class)
        return Part(source, share.places(len(source)), data.batch_size), share
    if asked.total > 1:
        raise DataError(
            "--shard needs data with numbered samples: an .npz, a folder or a dataset on disk. A loader of your own is "
            "split in Python: unmerge.collect(model, its_part) in each process, and the sum of what they return."
        )
    return requests.all_of(source, data.batch_size), None


def _parsed(shard: str | None) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard or "1/1")
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise typer.BadParameter(f"--shard {shard!r} is not of the form 3/16, from 1/16 to 16/16.")
    return int(found[1]), int(found[2])


def register(app: typer.Typer) -> None:
    add(app, "collect", collect, EXAMPLES, together=True)
