"""`unmerge merge-stats`: the statistics of all shards as those of one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.options import OverwriteFile
from unmerge.cli.run_directory import check_file
from unmerge.collecting.merging import merge, save_shard

EXAMPLES = [
    "unmerge merge-stats part*.safetensors --out all.safetensors",
    "unmerge run --model resnet --data images --forget label=cat --statistics all.safetensors --out forget-cat",
]


def merge_stats(
    output: Output,
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="What unmerge collect --shard I/N wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.")],
    overwrite: OverwriteFile = False,
) -> None:
    """Merge the statistics of all shards of a dataset; one that is missing, there twice or of other work is refused."""
    check_file(out, overwrite)
    merged, whole = merge(files)
    save_shard(merged, whole, out)
    output.show(f"{out}: {merged.samples} samples, {len(merged.layers)} layers from {len(files)} shards")
    output.result({"out": str(out), "samples": merged.samples, "shards": len(files), "layers": list(merged.layers)})


def register(app: typer.Typer) -> None:
    add(app, "merge-stats", merge_stats, EXAMPLES)
