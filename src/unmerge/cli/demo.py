"""`unmerge demo`: forget a digit, with every method beside it, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli import exports, models, requests, work
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.options import Overwrite
from unmerge.cli.run import perform
from unmerge.cli.run_directory import check_target
from unmerge.errors import FileError
from unmerge.recipe import Recipe

EXAMPLES = ["unmerge demo --fast", "unmerge demo --digit 8 --out forget-8", "unmerge demo --fast --json"]


def demo(
    output: Output,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out the baselines that train and the slow axes.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The directory to write; by default unmerge-demo.")
    ] = None,
    digit: Annotated[int, typer.Option(min=0, max=9, metavar="N", help="The digit to forget.")] = 3,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the split and of training.")] = 0,
    overwrite: Overwrite = False,
) -> int:
    """Forget a digit: train, edit, retrain for comparison, judge all, and write the report. Nothing is downloaded."""
    if out is None:
        out, overwrite = Path("unmerge-demo"), True  # what an earlier demo left there
    check_target(out, overwrite)
    try:
        from unmerge.bench.comparison import compared
        from unmerge.bench.tasks import digit_tasks

        output.note("training the model on ten digits, and again without one for comparison")
        task = digit_tasks(((digit,),), seed)[0]
    except ModuleNotFoundError as error:
        raise FileError(f"the demo needs {error.name}. Type: pip install 'unmerge[eval]'") from error
    output.note("unmerge and the methods it is compared with")
    evaluation = compared(task, fast=fast, seed=seed)

    def write_evaluation(directory: Path) -> dict[str, Any]:
        evaluation.to_json(directory / "evaluation.json")
        exports.write_model(directory, loaded)
        return {"evaluation": evaluation.to_dict()["tables"]["summary"]["rows"]}

    output.show(repr(evaluation["summary"]) + "\n")
    output.show(
        "ToW: closeness of the three accuracies to the retrained model's. Feature gap: how far forget and retain\n"
        "features lie apart, against the retrained model's; a logit mask hides the class and changes no feature.\n"
    )
    loaded = models.Loaded(task.model, "unmerge.bench.digits:network", weights=out / exports.WEIGHTS)
    request = requests.Requested(task.forget, task.retain, f"the digit {digit}")
    job = work.Job(loaded, "zero", request, Recipe(), work.Settings(), output)
    return perform(job, out, overwrite, "zero", before_report=write_evaluation)


def register(app: typer.Typer) -> None:
    add(app, "demo", demo, EXAMPLES)
