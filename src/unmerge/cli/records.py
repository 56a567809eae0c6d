"""The files of a run's output directory."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from unmerge import report
from unmerge.cli import recipes
from unmerge.cli.console import Output
from unmerge.cli.edits import is_refitted, write_norms
from unmerge.cli.measuring import Measured
from unmerge.cli.run_directory import RECORD
from unmerge.cli.work import Job
from unmerge.diagnosing.diagnosis import Diagnosis
from unmerge.report.extra import MissingExtra
from unmerge.storage.files import replacing, write_json
from unmerge.version import VERSION

_PACKAGES = ("torch", "safetensors", "numpy", "transformers")


def command_line() -> str:
    """What was typed, as a shell would read it."""
    return shlex.join(["unmerge", *sys.argv[1:]])


def versions() -> dict[str, str]:
    found = {"unmerge": VERSION, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(
    directory: Path,
    job: Job,
    diagnosis: Diagnosis,
    found: Measured,
    init: str,
    more: dict[str, Any],
) -> None:
    """Everything but the statistics, which stand there already, and the report."""
    found.edit.save(directory / "edit")
    diagnosis.to_json(directory / "diagnosis.json")
    if found.search is not None:
        write_json(directory / "alpha.json", found.search.to_dict())
    if found.norms:
        write_norms(directory, found.norms, found.edit.alpha)
    if found.curve:
        write_json(directory / "curve.json", found.curve)
    recipes.write(directory / "recipe.yaml", found.edit)
    record = {
        "command": command_line(),
        "folder": str(Path.cwd()),
        "model": job.model.reference,
        "weights": None if job.model.weights is None else str(job.model.weights),
        "init": init,
        "request": job.request.description,
        "alpha": found.edit.alpha,
        "measure": found.measure.name,
        found.measure.key: found.shares,
        f"{found.measure.key}_samples": job.settings.samples,
        "curve_rows": "removed rows of the head are left in for the curve" if found.edit.removed else "as applied",
        "recalibrated": bool(found.norms),
        "refitted": is_refitted(found.edit, found.norms),
        "versions": versions(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": job.seconds,
        "samples": found.samples,
        **more,
    }
    write_json(directory / RECORD, record)


def write_log(directory: Path, output: Output) -> None:
    with replacing(directory / "log.txt") as part:
        part.write_text("\n".join(output.log) + "\n")


def write_report(directory: Path, output: Output) -> bool:
    """The page, where its extra is installed; a run without it is still a run."""
    try:
        report.write(directory)
    except MissingExtra as error:
        output.warn(f"no report was written: {error} Then type: unmerge report DIR")
        return False
    return True
