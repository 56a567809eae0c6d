"""`unmerge diagnose`: whether a request can work, before anything is edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmerge.cli import models, plan, recipes, requests, work
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.known import named_statistics
from unmerge.cli.options import VERDICTS, Init, Known, OverwriteFile
from unmerge.cli.recipes import RecipeFile, RecipeFlags
from unmerge.cli.run_directory import check_file
from unmerge.distributed.processes import is_first
from unmerge.errors import suggest

EXAMPLES = [
    "unmerge diagnose --model resnet --data images --forget label=cat",
    "unmerge diagnose --model vit --data train.npz --forget-ids ids.txt --on-verdict raise   # may end with code 3",
    "unmerge diagnose --model my.models:build --weights w.safetensors --data train.npz --forget label=3 --json",
]


def diagnose(
    output: Output,
    model: models.ModelOptions,
    data: requests.DataOptions,
    file: RecipeFile,
    flags: RecipeFlags,
    init: Init = "zero",
    statistics: Known = None,
    on_verdict: Annotated[
        str, typer.Option(metavar="WORD", help="With raise, an instance-like request ends with exit code 3.")
    ] = "warn",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the diagnosis as JSON.")] = None,
    overwrite: OverwriteFile = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print layers, memory and time only.")] = False,
) -> int | None:
    """Say whether a request can work: separable, entangled or instance-like, and why, layer by layer."""
    data.check()
    if on_verdict not in VERDICTS:
        raise typer.BadParameter(f"--on-verdict {on_verdict!r}. {suggest(on_verdict, VERDICTS)}")
    recipe = recipes.recipe_of(flags, file.recipe)
    if out is not None:
        check_file(out, overwrite)
    loaded = models.load(model.model, model.weights, model.device)
    settings, init = work.Settings(on_verdict=on_verdict, check_init=False), loaded.start(init)
    job = work.Job(loaded, models.initial(init), requests.requested(data, loaded), recipe, settings, output)
    if dry_run:
        plan.show(job)
        return None
    known = None if statistics is None else named_statistics(statistics, job)
    found = work.gather(job, known)
    diagnosis = work.diagnosed(job, found)
    output.heading(job.request.description)
    output.show(str(diagnosis))
    if out is not None and is_first():
        diagnosis.to_json(out)
        output.note(f"written to {out}")
    if on_verdict == "raise":
        work.heed(job, found, diagnosis)
    output.result(diagnosis.to_dict())
    return None


def register(app: typer.Typer) -> None:
    add(app, "diagnose", diagnose, EXAMPLES, together=True)
