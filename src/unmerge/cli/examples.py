"""Worked examples below the help of a subcommand: as they are to be typed, however wide the terminal is."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

WIDTH = 80
_COMMENT = "   # "  # stands behind the command
_INDENT, _FURTHER = " ", "     "


def command_with(examples: list[str]) -> type[TyperCommand]:
    """A kind of command whose help ends with the examples; an epilog would be filled like a paragraph."""

    class CommandWithExamples(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            typer.secho(f"{_INDENT}Examples", bold=True)
            for example in examples:
                typer.echo("\n" + "\n".join(lines_of(example)))

    return CommandWithExamples


def lines_of(example: str) -> list[str]:
    """A comment first, then the command, with a backslash before the flag that would be too wide."""
    command, _, comment = example.partition(_COMMENT)
    lines = [f"{_INDENT}# {comment}"] if comment else []
    first, *flags = re.split(r" (?=-)", command)
    line = _INDENT + first
    for flag in flags:
        if len(f"{line} {flag} \\") > WIDTH:
            lines.append(f"{line} \\")
            line = _FURTHER + flag
        else:
            line += f" {flag}"
    return [*lines, line]
