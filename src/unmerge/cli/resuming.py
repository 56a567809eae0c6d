"""Finished passes of a run that was interrupted or killed: kept beside its target until the run is done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from unmerge.cli.parts import Part
from unmerge.collecting.statistics import Statistics
from unmerge.distributed.processes import exchange, is_first
from unmerge.errors import FileError, StatisticsError


class Kept:
    """The statistics of passes by what they were read from, so that the same command reads them instead."""

    def __init__(self, target: Path, inputs: Mapping[str, Any], device: torch.device) -> None:
        """inputs: all that decides what a pass finds, but the samples; its "data" is None where that is not known."""
        self.place = target.parent / f".{target.name}.resume"
        self.used: list[Path] = []
        self._inputs, self._device = inputs, device

    def passed(self, name: str, data: Any, read: Callable[[], Statistics]) -> Statistics:
        """What an earlier pass over the same samples found, or else `read()`, kept for a later run."""
        path = self._path(name, data)
        if path is None:
            return read()
        known = None
        with contextlib.suppress(FileError, StatisticsError):
            known = Statistics.load(path, self._device)
        # Where one of several processes cannot read it, all read the data.
        if all(exchange(known is not None)) and known is not None:
            self.used.append(path)
            return known
        found = read()
        # Where this cannot be written the run's own directory cannot either, and that says so.
        with contextlib.suppress(OSError, FileError):
            found.save(path)
        return found

    def has(self, name: str, data: Any) -> bool:
        path = self._path(name, data)
        return all(exchange(path is not None and path.is_file()))

    def forget(self) -> None:
        if is_first():
            shutil.rmtree(self.place, ignore_errors=True)

    def _path(self, name: str, data: Any) -> Path | None:
        """A name that only the same samples in the same batches, read in the same way, have."""
        if self._inputs.get("data") is None or not isinstance(data, Part):
            return None
        key = json.dumps([self._inputs, data.places, data.size], sort_keys=True)
        return self.place / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
