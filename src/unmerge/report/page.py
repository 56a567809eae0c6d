"""render() and write(): a report as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from unmerge.errors import FileError
from unmerge.report.extra import MissingExtra
from unmerge.report.parts import Report, read
from unmerge.storage.files import replacing
from unmerge.storage.forms import shown
from unmerge.version import VERSION


def write(directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the report of a run directory, by default as its `report.html`, and return where it is."""
    directory = Path(directory)
    target = directory / "report.html" if path is None else Path(path)
    page = rendered(directory)
    with replacing(target) as part:
        part.write_bytes(page.encode("utf-8", "replace"))
    return target


def rendered(directory: Path) -> str:
    """The page of a run directory; an error where its files are not as a run writes them."""
    report = read(directory)
    try:
        return render(report)
    except MissingExtra:
        raise
    except Exception as error:  # a strange value can fail anywhere in the page
        raise FileError(f"{directory} was written by another version of unmerge: {shown(error)}.") from error


def render(report: Report) -> str:
    """The page as text; every value from the run is escaped."""
    from unmerge.report.view import view

    script = _packaged("report.js")
    # The one script that may run, by its checksum; and nothing may be fetched.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {"style": _packaged("report.css"), "script": script, "digest": digest, "version": VERSION}
    return str(_template().render(**view(report), **values))


@cache
def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MissingExtra("jinja2") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_packaged("report.html.jinja"))


def _packaged(name: str) -> str:
    return files("unmerge.report").joinpath(name).read_text(encoding="utf-8")
