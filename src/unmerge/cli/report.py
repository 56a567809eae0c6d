"""`unmerge report`: the page of a run, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmerge import report as page
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.cli.run_directory import RECORD, check_folder
from unmerge.errors import FileError

EXAMPLES = ["unmerge report forget-cat", "unmerge report forget-cat --json"]


def report(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What unmerge run wrote.")],
) -> None:
    """Write report.html of a run again, for example after an update of unmerge; one file that opens offline."""
    check_folder(directory, "what unmerge run wrote")
    if not (directory / RECORD).is_file():
        raise FileError(f"{directory} is no output of unmerge run: there is no {RECORD} in it.")
    page.write(directory)
    output.show(str(directory / "report.html"))
    output.result({"report": str(directory / "report.html")})


def register(app: typer.Typer) -> None:
    add(app, "report", report, EXAMPLES)
