"""An evaluation as text, HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import html as escaping
import io
import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from unmerge.evaluation.result import Column, Evaluation, Table

Layout = Literal["rows", "columns"]
_ARROWS = {"higher": "↑", "lower": "↓", "near": "→", None: ""}
_LATEX_ARROWS = {"higher": r" $\uparrow$", "lower": r" $\downarrow$", "near": r" $\rightarrow$", None: ""}
_WIDTH = 120
_LEGEND = "↑ higher, ↓ lower, → nearer to the retrained model is better"


def text(result: Evaluation) -> str:
    """Every table with aligned columns; the best cells carry a star."""
    parts = [table_text(table) for table in result.tables.values()]
    parts += [f"({legend})"] if (legend := _legend(result, "* best; ")) else []
    parts += [_missing(result, "- {}: {}")] if result.missing else []
    return "\n\n".join(parts)


def markdown(result: Evaluation, models_as: Layout = "rows") -> str:
    parts = []
    for table in result.tables.values():
        header, *rows = [[cell.replace("|", r"\|") for cell in line] for line in _grid(table, models_as, "**{}**")]
        rule = ["---", *["---:"] * (len(header) - 1)]
        lines = "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))
        parts.append(f"**{table.title}**\n\n{lines}")
    parts += [f"{legend}."] if (legend := _legend(result)) else []
    parts += [_missing(result, "- {}: {}")] if result.missing else []
    return "\n\n".join(parts) + "\n"


def latex(result: Evaluation, models_as: Layout = "columns") -> str:
    """A tabular with booktabs rules for each table."""
    parts = []
    for table in result.tables.values():
        header, *rows = _grid(table, models_as, r"\textbf{{{}}}", latex_text=True)
        lines = [
            f"% {table.title}",
            rf"\begin{{tabular}}{{l|{'c' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        parts.append("\n".join(lines))
    parts += [_missing(result, "% {}: {}", "% missing")] if result.missing else []
    return "\n\n".join(parts) + "\n"


def html(result: Evaluation) -> str:
    parts = []
    for table in result.tables.values():
        header, *rows = _grid(table, "rows", "\0{}")
        head = "".join(f"<th>{escaping.escape(cell)}</th>" for cell in header)
        body = "".join(f"<tr>{''.join(_html_cell(cell) for cell in row)}</tr>" for row in rows)
        caption = escaping.escape(table.title)
        parts.append(f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if result.missing:
        items = "".join(
            f"<li>{escaping.escape(what)}: {escaping.escape(why)}</li>" for what, why in result.missing.items()
        )
        parts.append(f"<p>missing</p><ul>{items}</ul>")
    return "\n".join(parts)


def csv_lines(result: Evaluation) -> str:
    """One line a figure, all tables below each other."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(["table", "model", "figure", "value", "low", "high", "best"])
    for table in result.tables.values():
        for column in table.columns:
            best = table.best(column)
            for model, row in table.cells.items():
                if (figure := row.get(column.label)) is not None:
                    bounds = ["" if bound is None else bound for bound in (figure.low, figure.high)]
                    writer.writerow([table.title, model, column.label, figure.value, *bounds, int(model in best)])
    return target.getvalue()


def _grid(table: Table, models_as: Layout, mark: str, latex_text: bool = False) -> list[list[str]]:
    """The cells as text, header first; `mark` is put around the best."""
    arrows = _LATEX_ARROWS if latex_text else _ARROWS
    clean = _latex_escaped if latex_text else str
    space = "" if latex_text else " "
    columns = [
        [f"{clean(column.label)}{space if column.better else ''}{arrows[column.better]}", *_cells(table, column, mark)]
        for column in table.columns
    ]
    if latex_text:
        columns = [[cell.replace(" ±", r"\,$\pm$\,") for cell in column] for column in columns]
    columns.insert(0, ["", *(clean(model) for model in table.cells)])
    if models_as == "columns":
        return columns
    return [list(line) for line in zip(*columns, strict=True)]


def _cells(table: Table, column: Column, mark: str) -> list[str]:
    best = table.best(column)
    found = []
    for model, row in table.cells.items():
        figure = row.get(column.label)
        if figure is None or math.isnan(figure.value):
            found.append("–")
            continue
        scale = 100 if column.percent else 1
        cell = f"{scale * figure.value:.{column.digits}f}"
        if cell.startswith("-") and float(cell) == 0:
            cell = cell[1:]
        cell = mark.format(cell) if model in best else cell
        if figure.low is not None and figure.high is not None:
            cell += f" ±{scale * (figure.high - figure.low) / 2:.{column.digits}f}"
        found.append(cell)
    return found


def table_text(table: Table) -> str:
    """A title and aligned columns: models as rows, or as columns where that is too wide and this is narrower."""
    layouts = [_aligned(_grid(table, models_as, "{}*")) for models_as in ("rows", "columns")]
    widths = [len(layout.partition("\n")[0]) for layout in layouts]
    return f"{table.title}\n{layouts[0] if widths[0] <= max(_WIDTH, widths[1]) else layouts[1]}"


def _aligned(grid: list[list[str]]) -> str:
    widths = [max(len(line[place]) for line in grid) for place in range(len(grid[0]))]
    lines = []
    for line in grid:
        first, *rest = [
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join([first, *rest]).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def _missing(result: Evaluation, line: str, title: str = "missing") -> str:
    return "\n".join([title, *(line.format(what, why) for what, why in result.missing.items())])


def _legend(result: Evaluation, best: str = "") -> str:
    """What the arrows mean, where there are any, and what stands behind ±, where there are intervals."""
    tables = result.tables.values()
    words = []
    if any(column.better for table in tables for column in table.columns):
        words += [f"{best}{_LEGEND}"]
    figures = (figure for table in tables for row in table.cells.values() for figure in row.values())
    if any(figure.low is not None for figure in figures):
        words += [f"± half of a {_level(result)} bootstrap interval"]
    return "; ".join(words)


def _level(result: Evaluation) -> str:
    return f"{100 * result.settings.get('level', 0.95):g} %"


def _html_cell(cell: str) -> str:
    content = escaping.escape(cell.removeprefix("\0"))
    return f"<td><b>{content}</b></td>" if cell.startswith("\0") else f"<td>{content}</td>"


def _latex_escaped(words: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    special |= {"–": "--", "−": "$-$", "²": "$^2$", "‖": r"$\|$", "≤": r"$\le$"}
    return "".join(special.get(character, character) for character in words)
