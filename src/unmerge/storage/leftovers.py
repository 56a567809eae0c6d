"""Unfinished files and directories: one that a living process writes is locked; what a killed one left is removed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked and so nothing removed
    fcntl = None  # type: ignore[assignment]

_SUFFIXES = PART, OLD = ".part", ".old"


@contextlib.contextmanager
def unfinished(target: Path, suffix: str = PART) -> Iterator[Path]:
    """A new hidden directory beside `target`; its lock goes with the process, however that ends, and is gone after the
    block, as is the directory if it is still there.

    A file is written inside of one too: what writes it may put a new file in its place, which would have no lock.
    """
    place, descriptor = _locked_new(target, suffix)
    try:
        yield place
    finally:
        _remove(place)
        if descriptor is not None:
            os.close(descriptor)


def sweep(target: Path) -> None:
    """Remove what killed processes left of writing `target`, and put back what one of them had moved aside."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}({'|'.join(map(re.escape, _SUFFIXES))})")
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # a folder that cannot be read or changed is told of by the write itself
        for name in os.listdir(target.parent):
            if pattern.fullmatch(name):
                _sweep_one(target.parent / name, target)


def _locked_new(target: Path, suffix: str) -> tuple[Path, int | None]:
    """A new directory and what holds its lock, where there are locks."""
    while True:
        place = Path(tempfile.mkdtemp(suffix, f".{target.name}.", target.parent))
        if fcntl is None:
            return place, None
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = _opened(place)
            try:
                _lock(descriptor)
                os.stat(place)
            except OSError:
                os.close(descriptor)
                raise
            return place, descriptor
        # Another process took it for a leftover before it was locked: once more.


def _sweep_one(place: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = _opened(place)
        try:
            if _lock(descriptor):
                if place.suffix == OLD and not target.exists():
                    os.rename(place / "old", target)
                _remove(place)
        finally:
            os.close(descriptor)


def _opened(place: Path) -> int:
    return os.open(place, os.O_RDONLY if place.is_dir() else os.O_RDWR)


def _lock(descriptor: int) -> bool:
    """Whether it could be locked, which not every file system can; BlockingIOError where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)
