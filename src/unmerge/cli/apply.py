"""`unmerge apply`: a new model directory with the edit in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli import checkpoints, edits, exports, models, requests
from unmerge.cli import run_directory as directories
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.options import Overwrite
from unmerge.editing.edit import Edit
from unmerge.errors import FileError
from unmerge.interop.card import model_card
from unmerge.interop.checkpoints import put_edited
from unmerge.storage.files import read_json, write_tensors
from unmerge.storage.forms import shown

EXAMPLES = [
    "unmerge apply forget-cat --model resnet --to resnet-without-cat",
    "unmerge apply forget-3-5 --model my.models:build --weights w.safetensors --alpha 1.5 --to edited",
    "unmerge apply forget-cat --model resnet --to new --recalibrate --data images --forget label=cat",
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
            help="Re-estimate BatchNorm and refit the classifier here, on the data of the run: with its data flags.",
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
    place = Path(model.model).expanduser()
    if model.weights is None and not recalibrate and checkpoints.is_language_checkpoint(place):
        _apply_to_files(output, directory, edit, place, model.model, to, alpha, force, overwrite)
        return
    loaded = models.load(model.model, model.weights, model.device)
    _check_elsewhere(loaded.directory, to)
    behind: dict[str, Any] = {}
    if recalibrate:
        request = requests.requested(data, loaded)
        behind = {"recalibrate": request.retain, "forget": request.forget}
    before = {name: value.detach().clone().cpu() for name, value in loaded.module.state_dict().items()}
    known = exports.checksums(before)
    with directories.replacing_directory(to, overwrite) as part:
        edit, strength, recalibrated = edits.apply(directory, loaded.module, alpha, force=force, **behind)
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
        exports.write_record(
            part, exports.origin_of(loaded.reference, loaded.directory, loaded.weights), known, details
        )
        _card(part, directory, edit, loaded.reference, loaded.directory is not None, strength)
    _tell(output, to, loaded.reference, details)


def _apply_to_files(
    output: Output,
    directory: Path,
    edit: Edit,
    place: Path,
    reference: str,
    to: Path,
    alpha: float | None,
    force: bool,
    overwrite: bool,
) -> None:
    """Apply an edit to a language model's checkpoint, one tensor at a time."""
    _check_elsewhere(place, to)
    strengths = edit.strengths(alpha, None)
    known = checkpoints.checksums(place)
    with directories.replacing_directory(to, overwrite) as part:
        put_edited(part, place, edit, *strengths, force)
        after = checkpoints.checksums(part)
        details: dict[str, Any] = {
            "edit": str(directory.resolve()),
            "alpha": strengths[0],
            "recalibrated": False,
            "as_files": True,
            "changed": [name for name, value in after.items() if known[name] != value],
            "checksum": exports.checksum(after),
        }
        exports.write_record(part, exports.origin_of(reference, place, None), known, details)
        _card(part, directory, edit, reference, True, strengths[0])
    _tell(output, to, reference, details)


def _check_elsewhere(base: Path | None, to: Path) -> None:
    if base is not None and base.resolve() == to.resolve():
        raise FileError(f"{to} is the model itself. Choose another directory: the base stays as it is.")


def _tell(output: Output, to: Path, reference: str, details: dict[str, Any]) -> None:
    changed = len(details["changed"])
    output.show(f"{to}: {changed} tensors changed at alpha {details['alpha']:g}; {reference} is as it was.")
    output.result({"to": str(to), "base": reference, **details})


def _card(part: Path, run: Path, edit: Edit, reference: str, is_directory: bool, alpha: float | None) -> None:
    """README.md in Hugging Face form."""
    (part / "README.md").write_text(card_of(run, edit, reference, is_directory, alpha), encoding="utf-8")


def card_of(run: Path, edit: Edit, reference: str, is_directory: bool, alpha: float | None) -> str:
    """The card of a model with the edit of a run, with what the run says of itself."""
    record, evaluation = (_json(run / name) for name in (directories.RECORD, "evaluation.json"))
    request = record.get("request")
    # A bare name would read as a repository on the Hub.
    base = f"./{reference}" if is_directory and "/" not in reference else reference
    try:
        return model_card(
            edit.to_dict(),
            base,
            alpha=alpha,
            request=request if isinstance(request, str) else None,
            library_name="transformers" if is_directory else "pytorch",
            evaluation=evaluation or None,
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        place = run / "evaluation.json"
        raise FileError(f"{place} was written by another version of unmerge: {shown(error)}.") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, "record of a run")
    except FileError:
        return {}
    return found if isinstance(found, dict) else {}


def register(app: typer.Typer) -> None:
    add(app, "apply", apply, EXAMPLES)
