"""Model directories: written with a record of the model they were made from, and checked when read back."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from unmerge.cli.models import Loaded
from unmerge.cli.run_directory import APPLIED, check_folder
from unmerge.errors import FileError
from unmerge.storage.files import load_weights, read_json, write_json, write_tensors
from unmerge.storage.fingerprint import fingerprint
from unmerge.storage.forms import check_fields
from unmerge.version import VERSION

WEIGHTS = "model.safetensors"
BEFORE = "before.safetensors"  # what the edit changed, where the base lies in no file
KIND = "weights"
BESIDE = (".json", ".txt", ".model", ".jinja")  # of what stands beside the weights: preprocessing, tokenizer
_NOT_BESIDE = ("config.json", "run.json", "adapter_config.json", APPLIED)


def checksums(state: Mapping[str, Tensor]) -> dict[str, str]:
    return fingerprint(state)


def checksum(tensors: Mapping[str, str]) -> str:
    """One checksum of all tensors."""
    return hashlib.sha256(json.dumps(dict(sorted(tensors.items()))).encode()).hexdigest()


def write_model(directory: Path, model: Loaded) -> None:
    """The model as it is now: a Hugging Face directory where it came from one, else its weights."""
    if model.directory is None:
        write_tensors(directory / WEIGHTS, model.module.state_dict(), KIND, {"unmerge": VERSION})
        return
    try:
        model.module.save_pretrained(directory)  # type: ignore[operator]
    except SafetensorError as error:
        raise FileError(f"{directory} could not be written: {error}") from error
    places = [model.directory, *([] if model.base is None else [model.base])]
    for file in (file for place in places for file in sorted(place.iterdir())):
        wanted = file.is_file() and file.suffix in BESIDE and file.name not in _NOT_BESIDE
        if wanted and not file.name.endswith(".index.json") and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)


def origin_of(reference: str, directory: Path | None, weights: Path | None) -> dict[str, str | None]:
    """Where a model came from, as a record says it."""
    return {
        "reference": reference,
        "directory": None if directory is None else str(directory.resolve()),
        "weights": None if weights is None else str(weights.resolve()),
    }


def write_record(
    directory: Path, origin: Mapping[str, str | None], before: Mapping[str, str], more: Mapping[str, Any]
) -> None:
    """Which model this one was made from, and what was done to it."""
    record = {
        "kind": "edited model",
        "unmerge": VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "base": {
            **origin,
            "checksum": checksum(before),
            "tensors": dict(before),
        },
        **more,
    }
    write_json(directory / APPLIED, record)


def read_record(directory: Path) -> dict[str, Any]:
    check_folder(directory, "what unmerge apply wrote")
    path = directory / APPLIED
    if not path.is_file():
        raise FileError(f"{directory} was not written by unmerge apply: there is no {APPLIED} in it.")
    record: dict[str, Any] = read_json(path, "record of unmerge apply")
    try:
        check_fields(record, {"base": dict[str, Any]}, "it")
        base = record["base"]
        check_fields(base, {"tensors": dict[str, str], "checksum": str}, "its base")
        if checksum(base["tensors"]) != base["checksum"]:
            raise FileError(f"{path} was changed after it was written: its checksums do not match.")
        check_fields(base, {"reference": str, "directory": str | None, "weights": str | None}, "its base")
    except TypeError as error:
        raise FileError(f"{path} is damaged: {error}.") from error
    return record


def weights_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, or of the one in a directory."""
    return load_weights(path / WEIGHTS if path.is_dir() else path)
