"""Puts the tables of results/ into README.md and docs/: no table there is typed by hand.

    python -m unmerge.bench.tables            # rewrites the blocks
    python -m unmerge.bench.tables --check    # fails where a block differs from its results

A block stands between `<!-- results:NAME -->` and `<!-- /results -->`. NAME is a file of results/ without its suffix:
the summary table of an evaluation (digits, cifar100/trees-zero-0), or "NAME:TABLE" for another of its tables. Of many
files (cifar100/*-zero-0) it is the mean of every row that all of them have, or with "@ROW" behind it that row of each,
its mean and its standard deviation. "NAME with NAMES@ROW" adds the mean of a row that only some files have, such as the
second retrainings, and says whose it is: of other requests, so only what is measured against their own reference.
"NAME + NAME" joins the rows of runs with the same reference.
"NAME showing COLUMN, COLUMN" leaves out the other columns, "NAME only ROW | ROW" the other rows; "ROW as WORDS" there
says what a row is called on the page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from unmerge.errors import FileError, listing, suggest
from unmerge.evaluation import Evaluation, Figure, Table

_BLOCK = re.compile(r"(<!-- results:(.+?) -->\n).*?(<!-- /results -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where something would change")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder with README.md, docs/ and results/")
    options = parser.parse_args()
    if not (options.root / "README.md").is_file():
        parser.error(f"there is no README.md in {options.root.resolve()}: run it in the repository, or pass --root.")
    stale = []
    for page in [options.root / "README.md", *sorted((options.root / "docs").glob("*.md"))]:
        text = page.read_text()
        filled = rendered(text, options.root / "results")
        if filled != text:
            stale.append(str(page))
            if not options.check:
                page.write_text(filled)
    print("changed: " + ", ".join(stale) if stale else "every table is that of its results")
    if stale and options.check:
        sys.exit(1)


def rendered(text: str, results: Path) -> str:
    """The page with every block filled from its results."""
    return _BLOCK.sub(lambda block: block[1] + table(block[2], results) + block[3], text)


def table(name: str, results: Path) -> str:
    """One table of an evaluation, or over several, as Markdown."""
    name, _, columns = name.partition(" showing ")
    name, _, rows = name.partition(" only ")
    name, _, borrowed = name.partition(" with ")
    source, _, row = name.partition("@")
    file, _, title = source.partition(":")
    settings: Mapping[str, Any] = {}
    if "*" in file:
        tables = _tables(file, title or "summary", results)
        shown = _each(tables, row) if row else _means(tables)
    else:
        found = [_found(each, results) for each in file.split(" + ")]
        shown, settings = _joined([each[title or "summary"] for each in found], file), found[0].settings
    if borrowed:
        shown = _with_row(shown, borrowed, title or "summary", results)
    if rows:
        shown = _only(shown, rows.split(" | "))
    return _lines(_showing(shown, columns.split(", ")) if columns else shown, settings)


def _joined(tables: list[Table], names: str) -> Table:
    """The rows of all tables, the first's first; they must have been judged by the same reference."""
    first, *others = tables
    cells = dict(first.cells)
    for other in others:
        differ = [row for row in other.cells if row in cells and other.cells[row] != cells[row]]
        if first.reference not in other.cells or differ:
            rows = listing(differ or [str(first.reference)])
            raise FileError(
                f"a page joins results:{names}, and {rows} is not the same in all. "
                "Rows of one table need one reference."
            )
        cells |= other.cells
    anchors = dict.fromkeys(anchor for each in tables for anchor in each.anchors)
    return replace(first, cells=cells, anchors=list(anchors))


def _means(tables: Mapping[str, Table]) -> Table:
    """The mean of every row that all tables have."""
    first = next(iter(tables.values()))
    cells = {
        row: _over([each[row] for each in tables.values()], fmean)
        for row in first.cells
        if all(row in each.cells for each in tables.values())
    }
    return replace(first, cells=cells)


def _each(tables: Mapping[str, Table], row: str) -> Table:
    """One row of the tables that have it, under their names, its mean and, of two or more, its deviation."""
    found = _having(row, tables)
    first = next(iter(tables.values()))
    cells = {name: {label: Figure(figure.value) for label, figure in own.items()} for name, own in found.items()}
    cells["mean"] = _over(list(found.values()), fmean)
    if len(found) > 1:
        cells["deviation"] = _over(list(found.values()), stdev)
    return replace(first, cells=cells, anchors=list(cells))


def _with_row(shown: Table, borrowed: str, title: str, results: Path) -> Table:
    """The table with the mean of a row over the files that have it, behind the rows that nothing is compared with.

    Only what the reference has of 0 or 1 is told, being measured against it: the rest depends on the request.
    """
    pattern, _, row = borrowed.partition("@")
    if not row or "*" not in pattern:
        raise FileError(
            f"a page shows a table with {borrowed!r}; expected NAMES@ROW, such as cifar100/*-zero-0@retrained again."
        )
    own = shown.cells.get(shown.reference or "", {})
    strange = {
        column.label
        for column in shown.columns
        if column.label in own and (column.better == "near" or own[column.label].value not in (0, 1))
    }
    found = _having(row, _tables(pattern, title, results))
    label = f"{row} ({', '.join(found)})"
    above = [name for name in shown.cells if name in shown.anchors]
    order = [*above, label, *(name for name in shown.cells if name not in above)]
    means = _over(list(found.values()), fmean)
    cells = {**shown.cells, label: {key: figure for key, figure in means.items() if key not in strange}}
    return replace(shown, cells={name: cells[name] for name in order}, anchors=[*shown.anchors, label])


def _having(row: str, tables: Mapping[str, Table]) -> dict[str, dict[str, Figure]]:
    """This row of the tables that have it."""
    found = {name: each[row] for name, each in tables.items() if row in each.cells}
    if not found:
        raise FileError(f"a page shows the row {row!r} of {listing(list(tables))}, and none of them has it.")
    return found


def _showing(shown: Table, labels: list[str]) -> Table:
    """The table with some columns alone."""
    columns = {column.label: column for column in shown.columns}
    unknown = [label for label in labels if label not in columns]
    if unknown:
        raise FileError(f"a page shows the column {unknown[0]!r}. {suggest(unknown[0], columns)}")
    return replace(shown, columns=[columns[label] for label in labels])


def _only(shown: Table, rows: list[str]) -> Table:
    """The table with some rows alone, under the names that the page gives them."""
    names = {row: name or row for row, _, name in (entry.partition(" as ") for entry in rows)}
    if len(set(names.values())) < len(rows):
        raise FileError(f"a page shows a row twice, or two under one name: {' | '.join(rows)}. Name each once.")
    unknown = [row for row in names if row not in shown.cells]
    if unknown:
        raise FileError(f"a page shows the row {unknown[0]!r}. {suggest(unknown[0], shown.cells)}")
    return replace(
        shown,
        cells={name: shown[row] for row, name in names.items()},
        anchors=[names.get(row, row) for row in shown.anchors],
        reference=shown.reference and names.get(shown.reference, shown.reference),
    )


def _over(rows: list[dict[str, Figure]], taken: Callable[[list[float]], float]) -> dict[str, Figure]:
    """What is taken (the mean, say) of each figure that all rows have."""
    labels = [label for label in rows[0] if all(label in row for row in rows)]
    return {label: Figure(taken([row[label].value for row in rows])) for label in labels}


def _tables(pattern: str, title: str, results: Path) -> dict[str, Table]:
    """This table of every file that the pattern names, under what its name has in place of the star."""
    before, _, after = pattern.partition("*")
    files = sorted(results.glob(f"{pattern}.json"))
    if not files:
        raise FileError(f"a page shows results:{pattern}, but there is no such file in {results}.")
    named = [str(path.relative_to(results)).removesuffix(".json") for path in files]
    names = [name.removeprefix(before).removesuffix(after) for name in named]
    return {name: _read(path)[title] for name, path in zip(names, files, strict=True)}


def _found(name: str, results: Path) -> Evaluation:
    path = results / f"{name}.json"
    if not path.is_file():
        raise FileError(f"a page shows results:{name}, but there is no {path}. Run the benchmark that writes it.")
    return _read(path)


def _read(path: Path) -> Evaluation:
    return Evaluation.from_dict(json.loads(path.read_text()))


def _lines(shown: Table, settings: Mapping[str, Any]) -> str:
    lines = Evaluation({shown.title: shown}, {}, dict(settings)).to_markdown().strip().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    return "\n".join(lines[start:]) + "\n"


if __name__ == "__main__":
    main()
