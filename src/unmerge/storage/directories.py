"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from unmerge.errors import FileError
from unmerge.storage.files import check_place, umask
from unmerge.storage.leftovers import OLD, sweep, unfinished


@contextlib.contextmanager
def taking_the_place_of(target: Path) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well, and is removed otherwise."""
    check_place(target, is_folder=True)
    made = _made_parents(target.parent)
    sweep(target)
    is_replaced = target.is_dir() and any(target.iterdir())
    try:
        with unfinished(target) as part:
            yield part
            _open_to_others(part)
            if is_replaced:
                _swap(part, target)
            else:
                _fill(part, target)
    finally:
        _remove_empty(made)


def _fill(part: Path, target: Path) -> None:
    """Move to where nothing, or an empty directory, was at the start."""
    try:
        if target.is_dir():
            target.rmdir()
        os.rename(part, target)
    except OSError as error:
        if not target.exists():
            raise
        raise FileError(f"{target} was written by another process meanwhile. Choose another directory.") from error


def _swap(part: Path, target: Path) -> None:
    """Exchange the two; in one step where the system can, so that there is no moment without a target."""
    if _exchanged(part, target):
        return
    with unfinished(target, OLD) as aside:
        os.rename(target, aside / "old")
        try:
            os.rename(part, target)
        except BaseException:
            os.rename(aside / "old", target)
            raise


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the system exchanged two names; where it cannot, nothing has changed."""
    if sys.platform not in ("linux", "darwin"):
        return False
    system = ctypes.CDLL(None)
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(system, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return bool(system.renameat2(here, paths[0], here, paths[1], exchange) == 0)
    if hasattr(system, "renamex_np"):
        return bool(system.renamex_np(*paths, 2) == 0)  # RENAME_SWAP
    return False


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
