"""The command `unmerge`: one file a subcommand. Needs the extra: pip install 'unmerge[cli]'."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_EXTRA = ("typer", "rich", "yaml", "click")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        from unmerge.cli.application import app
        from unmerge.cli.processes import joined
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        print(f"unmerge: the command needs {error.name}. Type: pip install 'unmerge[cli]'", file=sys.stderr)
        return 1
    try:
        with joined():
            app(args=None if arguments is None else list(arguments), prog_name="unmerge")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    return 0
