"""OpenUnlearning's files: TOFU_EVAL.json with an entry a question, TOFU_SUMMARY.json with the figures alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unmerge.errors import FileError
from unmerge.evaluation.language.tofu import Metric
from unmerge.storage.files import write_json

EVAL, SUMMARY = "TOFU_EVAL.json", "TOFU_SUMMARY.json"


def write_evaluation(folder: Path, metrics: Mapping[str, Metric]) -> None:
    """Write both files into a folder; the summary, which says that all is there, comes last."""
    write_json(folder / EVAL, {name: _entry(metric) for name, metric in sorted(metrics.items())})
    write_json(folder / SUMMARY, {name: _number(metric.value) for name, metric in sorted(metrics.items())})


def read_evaluation(folder: Path) -> dict[str, Metric]:
    """The metrics of a folder, written here or by OpenUnlearning."""
    path = folder / EVAL
    try:
        found = json.loads(path.read_text())
        return {name: _metric(entry) for name, entry in found.items()}
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FileError(f"{path} is no evaluation: expected metric -> {{agg_value, value_by_index}}.") from error


def _entry(metric: Metric) -> dict[str, Any]:
    entry: dict[str, Any] = {"agg_value": _number(metric.value)}
    if metric.entries is not None:
        entry["value_by_index"] = {str(place): value for place, value in enumerate(metric.entries)}
    return entry


def _metric(entry: Mapping[str, Any]) -> Metric:
    value = entry["agg_value"]
    by_index = entry.get("value_by_index")
    entries = None if by_index is None else [by_index[key] for key in sorted(by_index, key=int)]
    return Metric(math.nan if value is None else float(value), entries)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
