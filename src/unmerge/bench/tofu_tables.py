"""The tables of the TOFU benchmark: the paper's columns first, then utility, memory and membership."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from unmerge.evaluation import Column, Figure, Table
from unmerge.evaluation.language import Metric
from unmerge.evaluation.language.tofu import UTILITY

RETRAINED, AGAIN, BASE, FINE_TUNED = "retrained", "retrained again", "base", "fine-tuned"
ANCHORS = (RETRAINED, AGAIN, BASE, FINE_TUNED)
_REPEATED = re.compile(r", seed \d+$")
_MEAN = ", mean of seeds"

SUMMARY = {
    "forget_quality": Column("forget quality", "higher", 4),
    "log_forget_quality": Column("log10", "higher", 1),
    "model_utility": Column("utility", "higher", 4),
    "forget_Q_A_Prob": Column("forget prob.", "near", 3),
    "forget_Q_A_ROUGE": Column("forget ROUGE", "near", 3),
    "retain_Q_A_Prob": Column("retain prob.", "near", 3),
    "extraction_strength": Column("extraction", "near", 3),
    "mia_min_k": Column("MIA min-k", "near", 3),
    "privleak": Column("PrivLeak", "near", 1),
    "alpha": Column("alpha", None, 2),
    "seconds": Column("seconds", "lower", 2),
    "search_seconds": Column("search s", None, 2),
}
OTHERS: dict[str, dict[str, Column]] = {
    "utility": {name: Column(name.replace("_", " "), "higher", 3) for name in (*UTILITY, "model_utility")},
    "forget set": {
        name: Column(name.replace("_", " "), "near", 3)
        for name in ("forget_Q_A_Prob", "forget_Q_A_PARA_Prob", "forget_Q_A_PERT_Prob", "forget_Truth_Ratio",
                     "forget_Q_A_ROUGE", "exact_memorization", "extraction_strength")
    },
    "membership": {
        name: Column(name.replace("_", " "), "near", 3)
        for name in ("mia_loss", "mia_zlib", "mia_reference", "mia_min_k", "mia_min_k_plus_plus", "privleak")
    },
}  # fmt: skip


def tables(metrics: Mapping[str, Mapping[str, Metric]], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Table]:
    """All tables, from the metrics of each row and what was recorded of how it was made (seconds, alpha)."""
    figures: dict[str, dict[str, float]] = {}
    for name, found in metrics.items():
        figures[name] = {key: metric.value for key, metric in found.items()}
        figures[name] |= {key: float(value) for key, value in records[name].items() if isinstance(value, (int, float))}
    means = _means(figures)
    figures |= means
    for own in figures.values():
        if own.get("forget_quality", 0) > 0:
            own["log_forget_quality"] = math.log10(own["forget_quality"])
    # Of a row with repetitions its mean competes: the best of several trainings is none.
    single = [name for name in figures if f"{original(name)}{_MEAN}" in means]
    return {title: _table(title, columns, figures, single) for title, columns in {"summary": SUMMARY, **OTHERS}.items()}


def repeated(name: str, seed: int) -> str:
    """What the row of a baseline is called that was trained with a further seed."""
    return f"{name}, seed {seed}"


def original(name: str) -> str:
    """The row that another repeats with a further seed, or the row itself."""
    return _REPEATED.sub("", name)


def _means(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The mean over each row and its repetitions, where it has any."""
    rows: dict[str, list[str]] = {}
    for name in figures:
        rows.setdefault(original(name), []).append(name)
    return {
        f"{first}{_MEAN}": {
            key: fmean(figures[name][key] for name in names)
            for key in figures[names[0]]
            if all(key in figures[name] for name in names)
        }
        for first, names in rows.items()
        if len(names) > 1
    }


def _table(
    title: str, columns: Mapping[str, Column], figures: Mapping[str, Mapping[str, float]], single: list[str]
) -> Table:
    cells = {
        name: {column.label: Figure(found[key]) for key, column in columns.items() if key in found}
        for name, found in figures.items()
    }
    anchors = [name for name in ANCHORS if name in cells] + single
    return Table(title, list(columns.values()), cells, anchors, RETRAINED if RETRAINED in cells else None)
