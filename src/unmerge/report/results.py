"""How well it worked: accuracy before and after, the tables of an evaluation, and the curve over alpha."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unmerge.report import charts
from unmerge.report.parts import Report
from unmerge.report.words import FIRST, NONE, TABLES, counted, percent

BEFORE = ("un-edited", "unedited", "before")  # rows of the accuracy table, the first that is there
AFTER = ("unmerge", "edited", "after")
_ARROWS = {"higher": ("↑", "higher is better"), "lower": ("↓", "lower is better"), "near": ("→", "nearer is better")}


def outcome(report: Report) -> list[dict[str, str]]:
    """Accuracy before and after: what the run measured, else from the evaluation, else from the curve."""
    measured = report.run.get("accuracy") or report.run.get("probability") or {}
    was, now = (measured.get(when) or {} for when in ("before", "after"))
    if names := [name for name in ("forget", "retain", "test") if name in was and name in now]:
        return [_change(name, was[name], now[name]) for name in names]
    rows = (report.evaluation or {}).get("tables", {}).get("accuracy", {}).get("rows", {})
    before, after = (next((rows[name] for name in names if name in rows), None) for names in (BEFORE, AFTER))
    if before and after:
        names = [name for name in ("forget", "retain", "test") if name in before and name in after]
        return [_change(name, before[name]["value"], after[name]["value"]) for name in names]
    points = {alpha: (forget, retain) for alpha, forget, retain in report.curve}
    if report.alpha in points and 0.0 in points and not report.edit["removed"]:
        pairs = zip(("forget", "retain"), points[0.0], points[report.alpha], strict=True)
        return [_change(name, old, new) for name, old, new in pairs if old is not None and new is not None]
    return []


def _change(name: str, before: float | None, after: float | None) -> dict[str, str]:
    return {"name": name, "before": percent(before), "after": percent(after)}


def removed(report: Report) -> list[str]:
    edit = report.edit
    ranks = [layer["rank"] for layer in edit["layers"].values()]
    said = []
    if ranks:
        spread = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
        plural = "" if spread == "1" else "s"
        said.append(f"{counted(len(ranks), 'layer')} changed by {spread} direction{plural} each.")
    shifts = sum(layer.get("shift_to") is not None for layer in edit["layers"].values())
    if shifts:
        said.append(f"A constant in {shifts} of them keeps the mean response to retained data where it was.")
    if edit["removed"]:
        classes = ", ".join(str(row) for row in edit["removed"])
        word = "output" if len(edit["removed"]) == 1 else "outputs"
        said.append(f"Of the classifier {edit['head']!r}, the {word} {classes} can no longer be predicted.")
    if report.run.get("recalibrated"):
        said.append("The statistics of BatchNorms behind them were estimated again on retained data.")
        if report.run.get("refitted"):
            said.append("There the classifier's rows of other classes were fitted to the edited features.")
    if report.alpha is not None:
        said.append(f"Strength alpha\u00a0=\u00a0{report.alpha:g}.")
    return said


def tables(report: Report) -> list[dict[str, Any]]:
    if report.evaluation is None:
        return []
    from unmerge.evaluation.result import Evaluation

    found = []
    for title, table in Evaluation.from_dict(report.evaluation).tables.items():
        best = {column.label: table.best(column) for column in table.columns}
        rows = []
        for model, figures in table.cells.items():
            cells = [
                {"text": _figure(figures.get(column.label), column), "best": model in best[column.label]}
                for column in table.columns
            ]
            rows.append({"name": model, "cells": cells, "anchor": model in table.anchors})
        columns = [
            {"name": column.label, "arrow": _ARROWS[column.better] if column.better else None}
            for column in table.columns
        ]
        about = TABLES.get(title, "")
        found.append({"title": title, "about": about, "columns": columns, "rows": rows})
    return sorted(found, key=lambda table: FIRST.index(table["title"]) if table["title"] in FIRST else len(FIRST))


def _figure(figure: Any, column: Any) -> tuple[str, str]:
    """The value and, beside it, half of its interval."""
    if figure is None or math.isnan(figure.value):
        return NONE, ""
    scale = 100 if column.percent else 1
    value = f"{scale * figure.value:.{column.digits}f}"
    value = value.removeprefix("-") if float(value) == 0 else value.replace("-", "−")
    if figure.low is None or figure.high is None:
        return value, ""
    return value, f"±{scale * (figure.high - figure.low) / 2:.{column.digits}f}"


def strength(report: Report) -> dict[str, Any] | None:
    curve = report.curve
    if not curve:
        return None
    search = report.search or {}
    first, last = curve[0][0], curve[-1][0]
    chosen = report.alpha if report.alpha is not None and first <= report.alpha <= last else None
    return {
        "chart": charts.alpha_chart(
            curve, chosen, search.get("target") if search.get("score") == "target" else None, report.measure
        ),
        "rows": [
            {"alpha": f"{alpha:g}", "forget": percent(forget), "retain": percent(retain), "used": alpha == chosen}
            for alpha, forget, retain in curve
        ],
        "points": [list(point) for point in curve],
        "first": first,
        "last": last,
        "step": _step(last - first),
        "start": chosen if chosen is not None else first,
        "chosen": chosen,
        "decided": _decided(search, report.measure),
        "note": _put_back(report, chosen),
    }


def _put_back(report: Report, chosen: float | None) -> str:
    """Why the curve and the result above differ where outputs of the classifier were removed."""
    if not report.edit["removed"]:
        return ""
    said = "Measured with the removed outputs of the classifier put back: with them out, no sample is labelled as a "
    said += "forgotten class at any alpha, and the curve would say nothing."
    here = next((percent(forget) for alpha, forget, _ in report.curve if alpha == chosen), None)
    above = next((entry["after"] for entry in outcome(report) if entry["name"] == "forget"), None)
    if here is None or above is None:
        return said
    return f"{said} At alpha\u00a0{chosen:g} forget accuracy is {here} with them in and, as above, {above} without."


def _step(span: float) -> float:
    """About two hundred stops, at a round distance."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 200))
    return float(f"{next(size for size in (1, 2, 5, 10) if size * power >= span / 200 * 0.999) * power:.6g}")


def _decided(search: Mapping[str, Any], measure: str) -> str:
    """Why the search stopped where it did."""
    if not search:
        return ""
    alpha, target = f"{search['alpha']:g}", percent(search["target"])
    reasons = {
        "target": f"{alpha} is the smallest alpha that was found to bring forget {measure} to {target} or less.",
        "retain": f"Beyond {alpha}, retain {measure} would fall by more than was allowed; forget {measure} stays above "
        f"{target}.",
        "max_alpha": f"No alpha that was tried brings forget {measure} to {target}; it is lowest at {alpha}.",
        "best score": f"{alpha} has the best score ({search['score']}) of those tried.",
    }
    return reasons.get(search["stopped_by"], "")
