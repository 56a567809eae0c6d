"""`unmerge evaluate`: models beside a retrained one, on several axes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from unmerge.cli import answers, edits, models, requests
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.measuring import ANSWERS, measure_of
from unmerge.cli.run_directory import check_file
from unmerge.data.batches import first_batch
from unmerge.distributed.processes import is_first
from unmerge.errors import suggest
from unmerge.evaluation.pipeline import AXES
from unmerge.evaluation.pipeline import evaluate as evaluated
from unmerge.evaluation.result import Evaluation
from unmerge.evaluation.summary import summary

WRITERS = {".json": "to_json", ".csv": "to_csv", ".md": "to_markdown", ".tex": "to_latex"}
EXAMPLES = [
    "unmerge evaluate --model base=resnet --model edited=resnet-without-cat --data train --forget label=cat "
    "--test test",
    "unmerge evaluate --model resnet --edit forget-cat --reference retrained --data train --forget label=cat "
    "--tables --out table.md --out table.tex",
    "unmerge evaluate --model llama-tuned --edit forget-authors --forget forget.jsonl --retain retain.jsonl",
    "unmerge evaluate --model my.models:build@w.safetensors --data train.npz --forget label=3 --axes accuracy --json",
]


def evaluate(
    output: Output,
    data: requests.DataOptions,
    model: Annotated[
        list[str],
        typer.Option("--model", metavar="[NAME=]REF", help="A model, as for run, or REF@FILE. May be repeated."),
    ],
    edit: Annotated[
        list[str] | None,
        typer.Option("--edit", metavar="[NAME=]OUT", help="The first model with this run's edit. May be repeated."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="REF", help="A model retrained without what is forgotten.")
    ] = None,
    floor: Annotated[
        str | None, typer.Option(metavar="REF", help="A second retrained model, which shows the noise.")
    ] = None,
    test: Annotated[str | None, typer.Option(metavar="SRC", help="Test data.", rich_help_panel="Data")] = None,
    axes: Annotated[str | None, typer.Option(metavar="A,B", help=f"Some of {', '.join(AXES)}. By default all.")] = None,
    features: Annotated[
        str | None, typer.Option(metavar="LAYER", help="The layer with the features, or LAYER:input.")
    ] = None,
    init: Annotated[str | None, typer.Option(metavar="REF", help="The weights before fine-tuning, as for run.")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of bootstrap, probes and attacks.")] = 0,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, ... or auto.")] = "auto",
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", metavar="FILE", help="Write the tables: .json, .csv, .md or .tex. May be repeated."),
    ] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Print every table, not the summary alone.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Judge models on the forget, retain and test data: accuracy, features, membership, fidelity and more.

    Of a language model it is the mean probability of the right answers.
    """
    data.check()
    chosen = _axes(axes)
    targets = [_target(path, overwrite) for path in out or []]
    loaded = {name: models.load(place, device=device) for name, place in map(_named, model)}
    if len(loaded) < len(model):
        raise typer.BadParameter("two models have one name. Give each its own: --model NAME=REF.")
    first = next(iter(loaded.values()))
    rows: dict[str, nn.Module] = {name: each.module for name, each in loaded.items()}
    for given in edit or []:
        name, place = _named(given)
        changed = copy.deepcopy(first.module)
        edits.apply(Path(place), changed)
        rows[name if name not in rows else f"{name} (edit)"] = changed
    request = requests.requested(data, first)
    splits: dict[str, Any] = {"forget": request.forget, "retain": request.retain}
    if test is not None:
        splits["test"] = requests.all_of(requests.opened(test, data, first), data.batch_size)
    others = [None if place is None else models.load(place, device=device).module for place in (reference, floor)]
    start = None if init is None else models.initial(init)
    output.note(f"evaluating {len(rows)} models on {request.description}")
    if measure_of(first_batch(request.forget, "forget")) is ANSWERS:
        if axes is not None:
            raise typer.BadParameter("--axes are those of classifiers; of texts the answer probability is measured.")
        found = answers.judged(rows, others[0], others[1], splits)
    else:
        found = evaluated(rows, others[0], splits, chosen, others[1], features=features, init=start, seed=seed)
    output.show(output.spelled(_shown(found, tables)))
    for path in targets if is_first() else ():
        _write(found, path)
        output.note(f"written to {path}")
    output.result({**found.to_dict(), "written": [str(path) for path in targets]})


def _shown(found: Evaluation, every: bool) -> str:
    """The summary of the tables, or all of them: also where there is no accuracy to head a summary."""
    if every or "accuracy" not in found.tables:
        return repr(found)
    short = replace(found, tables={"summary": summary(found.tables)})
    count = len(found.tables)
    return repr(short) + (f"\n\n--tables prints all {count} tables, --out FILE writes them." if count > 1 else "")


def _named(given: str) -> tuple[str, str]:
    name, equals, place = given.partition("=")
    if equals and name and place:
        return name, place
    return Path(given.partition("@")[0]).name, given


def _axes(given: str | None) -> list[str]:
    chosen = list(AXES) if given is None else [axis.strip() for axis in given.split(",")]
    for axis in chosen:
        if axis not in AXES:
            raise typer.BadParameter(f"--axes: there is no axis {axis!r}. {suggest(axis, AXES)}")
    return chosen


def _target(path: Path, overwrite: bool) -> Path:
    if path.suffix not in WRITERS:
        raise typer.BadParameter(f"--out {path}: expected a name that ends in {', '.join(WRITERS)}.")
    check_file(path, overwrite)
    return path


def _write(found: Evaluation, path: Path) -> None:
    getattr(found, WRITERS[path.suffix])(path)


def register(app: typer.Typer) -> None:
    add(app, "evaluate", evaluate, EXAMPLES, together=True)
