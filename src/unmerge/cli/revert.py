"""`unmerge revert`: the model from before an edit, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from unmerge.cli import checkpoints, exports, models
from unmerge.cli import run_directory as directories
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.options import Overwrite
from unmerge.errors import FileError, listing
from unmerge.storage.files import write_json, write_tensors
from unmerge.storage.fingerprint import differences
from unmerge.version import VERSION

EXAMPLES = [
    "unmerge revert resnet-without-cat --to resnet-again",
    "unmerge revert edited --to restored --base /new/place/of/w.safetensors   # where the base was moved",
]


def revert(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="NEWDIR", help="What unmerge apply wrote.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The directory to write.")],
    base: Annotated[
        Path | None, typer.Option("--base", metavar="PATH", help="Where the base is now, if it was moved.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Restore the model that apply started from, and check that every tensor has the bits that were recorded."""
    directories.check_target(to, overwrite)
    record = exports.read_record(directory)
    expected: dict[str, str] = record["base"]["tensors"]
    with directories.replacing_directory(to, overwrite) as part:
        if record.get("as_files"):
            place = _base(record, base)
            _check(checkpoints.checksums(place), expected, str(place))
            checkpoints.copy(place, part)
            found = checkpoints.checksums(part)
        elif (directory / "config.json").is_file():
            model = models.load(str(_base(record, base)), _weights(record, base), "cpu")
            _check(exports.checksums(model.module.state_dict()), expected, str(model.files))
            exports.write_model(part, model)
            found = exports.checksums(models.load(str(part), device="cpu").module.state_dict())
        else:
            state = _state(directory, record, base, expected)
            write_tensors(part / exports.WEIGHTS, state, exports.KIND, {"unmerge": VERSION})
            found = exports.checksums(exports.weights_in(part))
        _check(found, expected, "what was written")
        write_json(
            part / directories.APPLIED,
            {"kind": "restored model", "unmerge": VERSION, "checksum": record["base"]["checksum"]},
        )
    output.show(f"{to}: {len(expected)} tensors, bit-identical to {record['base']['reference']} before the edit.")
    output.result({"to": str(to), "identical": True, "checksum": record["base"]["checksum"]})


def _state(directory: Path, record: dict[str, Any], base: Path | None, expected: dict[str, str]) -> dict[str, Tensor]:
    """The weights of a base that is no Hugging Face model; its code is not run."""
    if base is None and (directory / exports.BEFORE).is_file():
        state = exports.weights_in(directory) | exports.weights_in(directory / exports.BEFORE)
        _check(exports.checksums(state), expected, str(directory))
        return state
    path = _base(record, base)
    state = exports.weights_in(path)
    _check(exports.checksums(state), expected, str(path))
    return state


def _base(record: dict[str, Any], base: Path | None) -> Path:
    """Where the base lies: where the user says, else where it lay."""
    if base is not None and not base.exists():
        raise FileError(
            f"there is no base {base}: expected the model that was edited, a directory or its weights file."
        )
    place = record["base"]["directory"] or record["base"]["weights"]
    path = base if base is not None else None if place is None else Path(place)
    if path is None or not path.exists():
        raise FileError(f"the base {path or record['base']['reference']} is not there any more. Pass --base PATH.")
    return path.resolve()  # which no reader takes for package.module:function


def _weights(record: dict[str, Any], base: Path | None) -> Path | None:
    given = record["base"]["weights"]
    return None if given is None or base is not None else Path(given)


def _check(found: dict[str, str], expected: dict[str, str], what: str) -> None:
    changed = differences(found, expected)
    if changed:
        raise FileError(f"{what} is not the model that was edited: {listing(changed)} differ from the record.")


def register(app: typer.Typer) -> None:
    add(app, "revert", revert, EXAMPLES)
