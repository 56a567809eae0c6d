"""Rows of text as an aligned table for a terminal, or as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = ["| " + " | ".join(row) + " |" for row in ([*columns], *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(columns) - 1))
    return "\n".join(lines)
