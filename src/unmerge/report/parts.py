"""Report: what a run directory holds, read from its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmerge.errors import FileError, listing
from unmerge.storage.files import read_json

REQUIRED = ("run.json", "diagnosis.json", "edit/edit.json")


@dataclass(frozen=True)
class Report:
    """The parts of a run as plain values; the last three are what a run may lack."""

    run: Mapping[str, Any]  # command, model, init, request, versions, created, seconds, samples; also alpha, accuracy
    diagnosis: Mapping[str, Any]  # Diagnosis.to_dict()
    edit: Mapping[str, Any]  # Edit.to_dict()
    search: Mapping[str, Any] | None = None  # AlphaSearch.to_dict()
    evaluation: Mapping[str, Any] | None = None  # Evaluation.to_dict()
    points: list[Mapping[str, Any]] = field(default_factory=list)  # a finer curve than the search's

    @property
    def measure(self) -> str:
        """What was measured on forget and retain data."""
        return str(self.run.get("measure", "accuracy"))

    @property
    def alpha(self) -> float | None:
        """The strength that was used: the run's own word, else what the search found, else the recommendation."""
        search = self.search or {}
        found = (self.run.get("alpha"), search.get("alpha"), self.edit.get("alpha"))
        return next((float(value) for value in found if value is not None), None)

    @property
    def curve(self) -> list[tuple[float, float, float | None]]:
        """Measured (alpha, forget, retain) by ascending alpha."""
        known: dict[float, tuple[float, float, float | None]] = {}
        for point in [*(self.search or {}).get("curve", []), *self.points]:
            alpha, forget, retain = (_finite(point.get(name)) for name in ("alpha", "forget", "retain"))
            if alpha is not None and forget is not None:
                known[alpha] = (alpha, forget, retain)
        return [known[alpha] for alpha in sorted(known)]


def read(directory: str | Path) -> Report:
    """The report of a directory that `unmerge run` wrote; what is optional may be missing."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileError(f"there is no directory {directory}.")
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    if missing:
        raise FileError(
            f"{directory} is not the output of a finished run: {listing(missing)} missing. Make it with `unmerge run`."
        )
    run, diagnosis, edit = (_json(directory / name, dict) for name in REQUIRED)
    return Report(
        run,
        diagnosis,
        edit,
        _json(directory / "alpha.json", dict),
        _json(directory / "evaluation.json", dict),
        _json(directory / "curve.json", list) or [],
    )


def _json(path: Path, kind: type) -> Any:
    """The value in a file, or None where there is no such file."""
    if not path.is_file():
        return None
    value = read_json(path, "JSON file, or damaged")
    if not isinstance(value, kind):
        raise FileError(f"{path} holds a {type(value).__name__}, expected a {kind.__name__}.")
    return value


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
