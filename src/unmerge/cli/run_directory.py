"""An output directory that appears whole or not at all, and what it says of the run that wrote it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmerge.collecting.statistics import Statistics
from unmerge.distributed.processes import exchange, is_first
from unmerge.errors import FileError, StatisticsError
from unmerge.storage.directories import taking_the_place_of
from unmerge.storage.files import name_place, read_json

STATISTICS = "statistics.safetensors"
RECORD = "run.json"
APPLIED = "unmerge.json"


@contextlib.contextmanager
def replacing_directory(target: Path, overwrite: bool) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well, and is removed otherwise.

    Of several processes the first has it; what the others write is lost.
    """
    if not is_first():
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    check_target(target, overwrite)
    try:
        with taking_the_place_of(target) as part:
            yield part
    except OSError as error:
        name_place(error, target)
        raise


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse to write over what is there, and ever over what unmerge did not write."""
    if target.is_file() or target.is_symlink():
        raise FileError(f"{target} is a file or a link; expected a directory, or none yet.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    ours = any((target / name).is_file() for name in (RECORD, APPLIED))
    if not ours:
        raise FileError(f"{target} is not empty and was not written by unmerge. Choose another directory.")
    if not overwrite:
        raise FileError(f"{target} is not empty. Choose another directory, or pass --overwrite to replace it.")


def check_folder(place: Path, expected: str) -> None:
    """Refuse a folder that is not there, before anything in it is missed."""
    if not place.is_dir():
        raise FileError(f"there is no folder {place}: expected {expected}.")


def check_file(target: Path, overwrite: bool) -> None:
    """Refuse, before the work, a file that is there already or that cannot be written."""
    if target.exists() and not overwrite:
        raise FileError(f"{target} is there already. Pass --overwrite to replace it.")
    place = next(place for place in target.absolute().parents if place.exists())
    if not os.access(place, os.W_OK):
        raise FileError(f"{target} cannot be written: {place} is read-only. Choose another place.")


def inputs_in(directory: Path) -> dict[str, Any]:
    """What the statistics in a directory were collected from, as far as it says so."""
    try:
        record = read_json(directory / RECORD, "record of a run")
    except FileError:
        return {}
    found = record.get("inputs") if isinstance(record, dict) else None
    return found if isinstance(found, dict) else {}


def known_statistics(target: Path, inputs: dict[str, Any]) -> tuple[Statistics, Path] | None:
    """Statistics of the same data and layers from an earlier finished run to this target."""
    path, found = target / STATISTICS, None
    if inputs.get("data") is not None and path.is_file() and inputs_in(target) == inputs:
        with contextlib.suppress(FileError, StatisticsError):
            found = Statistics.load(path)
    return (found, path) if all(exchange(found is not None)) and found is not None else None
