"""An output directory that appears whole or not at all, and statistics that outlive an interrupted run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmerge.errors import FileError, StatisticsError
from unmerge.statistics import Statistics

STATISTICS = "statistics.safetensors"
RECORD = "run.json"
APPLIED = "unmerge.json"


@contextlib.contextmanager
def replacing_directory(target: Path, overwrite: bool) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well, and is removed otherwise."""
    check_target(target, overwrite)
    made = _made_parents(target.parent)
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError:
        _remove_empty(made)
        raise
    try:
        yield part
        part.chmod(0o777 & ~_umask())
        _swap(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        _remove_empty(made)


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


def inputs_in(directory: Path) -> dict[str, Any]:
    """What the statistics in a directory were collected from, as far as it says so."""
    try:
        found = json.loads((directory / RECORD).read_text()).get("inputs", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def known_statistics(target: Path, inputs: dict[str, Any]) -> tuple[Statistics, Path] | None:
    """Statistics of the same data and layers from an earlier run to this target, finished or interrupted."""
    if inputs.get("data") is None:
        return None
    for directory in (kept_beside(target), target):
        path = directory / STATISTICS
        if path.is_file() and inputs_in(directory) == inputs:
            with contextlib.suppress(FileError, StatisticsError):
                return Statistics.load(path), path
    return None


def keep_statistics(part: Path, target: Path, inputs: dict[str, Any]) -> Path | None:
    """Put the finished statistics of an interrupted run where the next one finds them."""
    if not (part / STATISTICS).is_file() or inputs.get("data") is None:
        return None
    kept = kept_beside(target)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    os.replace(part / STATISTICS, kept / STATISTICS)
    (kept / RECORD).write_text(json.dumps({"inputs": inputs}))
    return kept


def forget_kept(target: Path) -> None:
    shutil.rmtree(kept_beside(target), ignore_errors=True)


def kept_beside(target: Path) -> Path:
    return target.parent / f".{target.name}.resume"


def _swap(part: Path, target: Path) -> None:
    if not target.exists():
        os.rename(part, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    os.rename(target, old / "old")
    try:
        os.rename(part, target)
    except BaseException:
        os.rename(old / "old", target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _made_parents(parent: Path) -> list[Path]:
    """The directories that had to be made, innermost first."""
    missing = [place for place in (parent, *parent.parents) if not place.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(made: list[Path]) -> None:
    for place in made:
        with contextlib.suppress(OSError):
            place.rmdir()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
