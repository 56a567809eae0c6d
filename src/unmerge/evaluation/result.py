"""The figures of an evaluation as tables that print themselves and export to JSON, CSV, Markdown and LaTeX."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from unmerge.distributed.processes import is_first
from unmerge.errors import DataError, suggest
from unmerge.evaluation import tables as rendering
from unmerge.storage.files import replacing, write_json

Better = Literal["higher", "lower", "near"]


@dataclass(frozen=True)
class Column:
    """What a figure is called, which way it is better ("near": close to the reference) and how it prints."""

    label: str
    better: Better | None = None
    digits: int = 3
    percent: bool = False


@dataclass(frozen=True)
class Figure:
    """A number and, where it comes from counting samples, its bootstrap interval."""

    value: float
    low: float | None = None
    high: float | None = None


Row = dict[Column, Figure]


@dataclass(frozen=True, repr=False)
class Table:
    """One table: a row for each model, a column for each figure; `anchors` are rows that do not compete."""

    title: str
    columns: list[Column]
    cells: dict[str, dict[str, Figure]]  # model, label
    anchors: list[str] = field(default_factory=list)
    reference: str | None = None

    def __getitem__(self, model: str) -> dict[str, Figure]:
        if model not in self.cells:
            raise DataError(f"table {self.title!r} has no row {model!r}. {suggest(model, self.cells)}")
        return self.cells[model]

    def __repr__(self) -> str:
        return rendering.table_text(self)

    def best(self, column: Column) -> list[str]:
        """The models whose printed figure is the best of the column; none where all are alike."""
        distances = {}
        for model, row in self.cells.items():
            figure = row.get(column.label)
            distance = None if figure is None or model in self.anchors else self._distance(column, figure.value)
            if distance is not None and math.isfinite(distance):
                distances[model] = round(distance, column.digits + (2 if column.percent else 0))
        if len(set(distances.values())) < 2:
            return []
        return [model for model, distance in distances.items() if distance == min(distances.values())]

    def _distance(self, column: Column, value: float) -> float | None:
        """How far a value is from the best there can be."""
        if column.better == "near":
            target = self.cells.get(self.reference or "", {}).get(column.label)
            return None if target is None else abs(value - target.value)
        if column.better is None:
            return None
        return value if column.better == "lower" else -value


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What was measured, what was not and why, and with which seeds and settings."""

    tables: dict[str, Table]
    missing: dict[str, str]
    settings: dict[str, Any]
    examples: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # membership scores on forget

    def __getitem__(self, title: str) -> Table:
        if title not in self.tables:
            reason = f" It is missing because {self.missing[title]}" if title in self.missing else ""
            raise DataError(f"there is no table {title!r}.{reason} {suggest(title, self.tables)}")
        return self.tables[title]

    def __repr__(self) -> str:
        return rendering.text(self)

    def _repr_html_(self) -> str:
        return rendering.html(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only; what is not a number is None. `from_dict` reads it back."""
        return {
            "tables": {
                title: {
                    "columns": [asdict(column) for column in table.columns],
                    "rows": {
                        model: {label: _plain(figure) for label, figure in row.items()}
                        for model, row in table.cells.items()
                    },
                    "anchors": table.anchors,
                    "reference": table.reference,
                    "best": {column.label: table.best(column) for column in table.columns if column.better},
                }
                for title, table in self.tables.items()
            },
            "missing": self.missing,
            "settings": self.settings,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Evaluation:
        """The evaluation that `to_dict` described."""
        tables = {}
        for title, table in value["tables"].items():
            rows = {
                model: {
                    label: Figure(math.nan if entry["value"] is None else entry["value"], entry["low"], entry["high"])
                    for label, entry in row.items()
                }
                for model, row in table["rows"].items()
            }
            columns = [Column(**column) for column in table["columns"]]
            tables[title] = Table(title, columns, rows, list(table["anchors"]), table["reference"])
        return cls(tables, dict(value["missing"]), dict(value["settings"]))

    def to_json(self, path: str | Path | None = None) -> str:
        """The evaluation as JSON, written to `path` where one is given; of several processes by the first."""
        if path is not None and is_first():
            write_json(Path(path), self.to_dict())
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line a figure: table, model, figure, value, low, high, best."""
        return _written(rendering.csv_lines(self), path)

    def to_markdown(self, path: str | Path | None = None, models_as: rendering.Layout = "rows") -> str:
        """A Markdown table for each table, the best cells bold; `models_as="columns"` is the paper's layout."""
        return _written(rendering.markdown(self, models_as), path)

    def to_latex(self, path: str | Path | None = None, models_as: rendering.Layout = "columns") -> str:
        """A booktabs table for each table in the paper's layout, the best cells bold."""
        return _written(rendering.latex(self, models_as), path)


def _plain(figure: Figure) -> dict[str, float | None]:
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in (("value", figure.value), ("low", figure.low), ("high", figure.high))
    }


def _written(content: str, path: str | Path | None) -> str:
    if path is not None and is_first():
        with replacing(Path(path)) as part:
            part.write_text(content)
    return content
