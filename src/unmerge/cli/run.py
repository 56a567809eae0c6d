"""`unmerge run`: from a model and a request to one directory with the edit and all that is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli import measuring, models, plan, recipes, records, requests, work
from unmerge.cli import run_directory as directories
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.known import data_read, named_statistics
from unmerge.cli.options import Init, Known, Overwrite, RunOptions
from unmerge.cli.recipes import RecipeFile, RecipeFlags
from unmerge.cli.resuming import Kept
from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import device_of
from unmerge.distributed.processes import is_first
from unmerge.errors import StatisticsError
from unmerge.placement.state import state_of
from unmerge.requests.gathering import needed_of
from unmerge.storage.fingerprint import fingerprint

NOT_REACHED = 4

EXAMPLES = [
    "unmerge run --model resnet --data images --forget label=cat --out forget-cat",
    "unmerge run --model my.models:build --weights w.safetensors --data train.npz --forget label=3,5 --out forget-3-5",
    "unmerge run --model vit --init vit-base --data train.npz --forget-ids ids.txt --recipe recipe.yaml "
    "--out forget-some",
    "unmerge run --model resnet --data images --forget label=dog --statistics forget-cat/statistics.safetensors "
    "--out forget-dog   # the next request: one pass over the dogs",
    "unmerge run --model llama-tuned --init llama --forget forget.jsonl --retain retain.jsonl --tokens answer "
    "--layers mlp:last8 --out forget-authors   # questions with answers, or texts, in a language model",
    "unmerge run --model resnet --data images --forget label=cat --out forget-cat --dry-run   # its memory and time",
]


def run(
    output: Output,
    model: models.ModelOptions,
    data: requests.DataOptions,
    file: RecipeFile,
    flags: RecipeFlags,
    options: RunOptions,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The directory to write.")],
    init: Init = "zero",
    statistics: Known = None,
    overwrite: Overwrite = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Leave report.html out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print layers, memory and time; write nothing.")] = False,
) -> int:
    """Make a model forget: diagnose the request, compute the edit, choose its strength, write a report.

    Writes edit/, norms.safetensors (BatchNorm at its strength), statistics.safetensors (for the next request),
    diagnosis.json, alpha.json, curve.json, recipe.yaml, run.json, log.txt and report.html. The model itself is not
    changed: see unmerge apply.
    """
    data.check()
    recipe = recipes.recipe_of(flags, file.recipe)
    settings = options.settings()
    if not dry_run:
        directories.check_target(out, overwrite)
    loaded = models.load(model.model, model.weights, model.device)
    init = loaded.start(init)
    job = work.Job(loaded, models.initial(init), requests.requested(data, loaded), recipe, settings, output)
    if dry_run:
        plan.show(job)
        return 0
    measuring.check(job)
    return perform(job, out, overwrite, init, statistics, report=not no_report)


def perform(
    job: work.Job,
    out: Path,
    overwrite: bool,
    init: str,
    statistics: Path | None = None,
    report: bool = True,
    before_report: Callable[[Path], dict[str, Any]] | None = None,
) -> int:
    """The whole run into one directory; returns the exit code."""
    output = job.output
    inputs = {"data": job.request.identity, "layers": _layers(job)}
    kept = _kept(job, out, inputs)
    with directories.replacing_directory(out, overwrite) as part:
        try:
            known = _known(job, out, inputs, statistics, kept)
            found = work.gather(job, known, kept)
            for path in kept.used:
                output.show(f"resuming from {path}: the same model and data, so they are not read again.")
            shard = data_read(job)
            found.everything.save(part / directories.STATISTICS, None if shard is None else asdict(shard))
            diagnosis = work.diagnosed(job, found)
            work.heed(job, found, diagnosis)
            output.heading(f"{job.request.description}: {diagnosis.verdict.kind}")
            output.show(diagnosis.verdict.sentence)
            measured = measuring.measured(job, work.fitted(job, found, diagnosis), found)
            resumed = known is not None or bool(kept.used)
            more: dict[str, Any] = {"inputs": inputs, "resumed": resumed}
            if before_report is not None:
                more |= before_report(part)
            records.write(part, job, diagnosis, measured, init, more)
            written = report and is_first() and records.write_report(part, output)
            _show(job, measured, out, written)
            records.write_log(part, output)
        except KeyboardInterrupt:
            if kept.place.is_dir():
                output.warn(f"finished statistics are kept in {kept.place}: the same command goes on from there.")
            raise
        except Exception:
            kept.forget()
            raise
    kept.forget()
    search = measured.search
    code = NOT_REACHED if search is not None and not search.reached else 0
    output.result(
        {
            "out": str(out),
            "report": str(out / "report.html") if written else None,
            "request": job.request.description,
            "verdict": diagnosis.verdict.kind,
            "alpha": measured.edit.alpha,
            "reached": None if search is None else search.reached,
            measured.measure.key: measured.shares,
            "layers": list(measured.edit.layers),
            "resumed": resumed,
            "seconds": job.seconds,
            "exit_code": code,
            **{key: value for key, value in more.items() if key not in ("inputs", "resumed")},
        }
    )
    return code


def _layers(job: work.Job) -> Any:
    """What decides which layers are read."""
    choice = work.layer_choice(job)
    return {
        name: value if value is None or isinstance(value, (int, str)) else list(value) for name, value in choice.items()
    }


def _kept(job: work.Job, out: Path, inputs: dict[str, Any]) -> Kept:
    """What an interrupted run of the same request has finished."""
    module = job.model.module
    reading = {**needed_of(job.recipe), "seed": job.recipe.seed, "weights": fingerprint(state_of(module))}
    return Kept(out, {**inputs, **reading}, device_of(module))


def _known(job: work.Job, out: Path, inputs: dict[str, Any], given: Path | None, kept: Kept) -> Statistics | None:
    """Statistics that make a pass over the retained data needless: those that were named, or of an earlier run."""
    if given is not None:
        found = named_statistics(given, job)
        job.output.note(f"the statistics of all the data come from {given}: only what is forgotten is read")
        return found
    is_kept = kept.has("forget", job.request.forget) and kept.has("retain", job.request.retain)
    earlier = None if is_kept else directories.known_statistics(out, inputs)
    if earlier is None:
        return None
    found, path = earlier
    try:
        found.check_weights(fingerprint(state_of(job.model.module)))
    except StatisticsError:
        job.output.note(f"{path} is of other weights and is not used")
        return None
    job.output.show(f"resuming from {path}: the same model and data, so only what is forgotten is read.")
    return found


def _show(job: work.Job, found: measuring.Measured, out: Path, written: bool) -> None:
    edit, output = found.edit, job.output
    if found.search is not None:
        output.show(str(found.search).partition("\n")[0])
    if found.shares:
        before, after = found.shares["before"], found.shares["after"]
        output.show(
            f"forget {found.measure.name} {before['forget']:.4f} -> {after['forget']:.4f}, "
            f"retain {before['retain']:.4f} -> {after['retain']:.4f} at alpha {edit.alpha:g}"
        )
    output.show(f"edit: {len(edit.layers)} layers, in {out / 'edit'}")
    if written:
        output.show(f"report: {out / 'report.html'}")
    output.show(f"next: unmerge apply {out} --model {job.model.typed} --to NEWDIR")


def register(app: typer.Typer) -> None:
    add(app, "run", run, EXAMPLES, together=True)
