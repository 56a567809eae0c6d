"""`unmerge apply`: a new model directory with the edit in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli import edits, exports, models, requests
from unmerge.cli import run_directory as directories
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.options import Overwrite
from unmerge.edit import Edit
from unmerge.errors import FileError
from unmerge.files import read_json, write_tensors
from unmerge.interop.card import model_card

EXAMPLES = [
    "unmerge apply forget-cat --model ./resnet --to resnet-without-cat",
    "unmerge apply forget-3 --model my.models:build --weights w.safetensors --alpha 1.5 --to edited",
    "unmerge apply forget-cat --model ./resnet --to new --recalibrate --data ./images --forget label=cat",
]


def apply(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="OUT", help="What unmerge run wrote, or its edit/.")],
    model: models.ModelOptions,
    data: requests.DataOptions,
    to: Annotated[Path, typer.Option("--to", metavar="NEWDIR", help="The directory to write.")],
    alpha: Annotated[
        float | None, typer.Option(min=0, metavar="A", help="The strength; by default the run's own.")
    ] = None,
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate",
            help="Re-estimate BatchNorm here, with the run's data flags.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also to weights that the edit was not fitted on.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a model with the edit applied. It records the base's path and checksum, so that revert can go back."""
    if recalibrate:
        data.check()
    directories.check_target(to, overwrite)
    edit = Edit.load(edits.edit_in(directory))
    loaded = models.load(model.model, model.weights, model.device)
    if loaded.directory is not None and loaded.directory.resolve() == to.resolve():
        raise FileError(f"{to} is the model itself. Choose another directory: the base stays as it is.")
    batches = requests.requested(data, loaded).retain if recalibrate else None
    before = {name: value.detach().clone().cpu() for name, value in loaded.module.state_dict().items()}
    known = exports.checksums(before)
    with directories.replacing_directory(to, overwrite) as part:
        edit, strength, recalibrated = edits.apply(directory, loaded.module, alpha, batches, force)
        after = exports.checksums(loaded.module.state_dict())
        changed = [name for name, value in after.items() if known[name] != value]
        exports.write_model(part, loaded)
        if loaded.files is None:
            # Nothing on disk to go back to, so what was changed is kept as it was.
            write_tensors(part / exports.BEFORE, {name: before[name] for name in changed}, exports.KIND, {})
        details: dict[str, Any] = {
            "edit": str(directory.resolve()),
            "alpha": strength,
            "recalibrated": recalibrated,
            "changed": changed,
            "checksum": exports.checksum(after),
        }
        exports.write_record(part, loaded, known, details)
        _card(part, directory, edit, loaded, strength)
    output.show(f"{to}: {len(changed)} tensors changed at alpha {strength:g}; {loaded.reference} is as it was.")
    output.result({"to": str(to), "base": loaded.reference, **details})


def _card(part: Path, run: Path, edit: Edit, model: models.Loaded, alpha: float | None) -> None:
    """README.md in Hugging Face form."""
    record, evaluation = (_json(run / name) for name in (directories.RECORD, "evaluation.json"))
    # A bare name would read as a repository on the Hub.
    base = model.reference if "/" in model.reference or model.directory is None else f"./{model.reference}"
    card = model_card(
        edit.to_dict(),
        base,
        alpha=alpha,
        request=record.get("request"),
        library_name="pytorch" if model.directory is None else "transformers",
        evaluation=evaluation or None,
    )
    (part / "README.md").write_text(card, encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, "record of a run")
    except FileError:
        return {}
    return found if isinstance(found, dict) else {}


def register(app: typer.Typer) -> None:
    add(app, "apply", apply, EXAMPLES)
