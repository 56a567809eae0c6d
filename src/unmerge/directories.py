"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unmerge.files import umask


@contextlib.contextmanager
def taking_the_place_of(target: Path) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well, and is removed otherwise."""
    made = _made_parents(target.parent)
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError:
        _remove_empty(made)
        raise
    try:
        yield part
        _open_to_others(part)
        _swap(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        _remove_empty(made)


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


def _open_to_others(directory: Path) -> None:
    """Modes as the umask has them: temporary directories, and files that libraries made as such, are the owner's."""
    taken = umask()
    for place in (directory, *directory.rglob("*")):
        place.chmod((0o777 if place.is_dir() else 0o666) & ~taken)
