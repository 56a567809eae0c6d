"""Numbers and names as the report writes them, and the sentences that explain a table."""

from __future__ import annotations

import math
from typing import Any

NONE = "–"

TABLES = {
    "summary": "The main figure of every axis, shares in percent. ToW is how close the three accuracies are to the "
    "retrained model's: 1 is equal. The feature gap is how far forget and retain features lie apart against that "
    "model's: a mask on the outputs changes no feature. A probe is trained anew on the frozen features.",
    "accuracy": "The share of samples that are labelled right, in percent. ToW is how close the three accuracies are "
    "to the retrained model's: 1 is equal.",
    "answers": "The mean probability of the right answers, in percent.",
    "groups": "The same for groups of samples, in percent.",
    "decodability": "How often a linear probe on the frozen features still labels forgotten and retained samples "
    "right, in percent. The probe is new, so hiding an output does not help.",
    "entanglement": "How far the distance between forget and retain features is from what the retrained model has. "
    "A mask on the outputs changes no feature, and cannot improve these figures.",
    "distances": "The distances between forget and retain features themselves.",
    "fidelity": "How far answers (KL divergence) and weights are from the retrained model's.",
    "relearning": "Accuracy on the forget set after a few steps of training on it, in percent.",
    "membership": "Whether an attacker takes forgotten samples for training data: nine attacks.",
    "membership gaps": "The same attacks as distances from the retrained model.",
    "seconds": "How long each took.",
    "calibration": "How far the confidence on retained data is from the accuracy there.",
}
FIRST = ("accuracy", "groups", "decodability", "entanglement")  # shown open; the other tables can be unfolded


def percent(share: float | None) -> str:
    """0.4963 as 49.6 %, with a thin space that does not break."""
    return NONE if _absent(share) else f"{100 * float(share or 0):.1f}\u202f%"


def number(value: Any, digits: int = 3) -> str:
    """Three significant digits, without an exponent where that is short; words stay as they are."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NONE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: Any) -> str:
    if _absent(value):
        return NONE
    if value < 60:
        return f"{value:.2f}\u202fs" if value < 10 else f"{value:.1f}\u202fs"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}\u202fh {minutes:02}\u202fmin" if hours else f"{minutes}\u202fmin {rest:02}\u202fs"


def setting(value: Any) -> str:
    """A recipe's value as a person would write it."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def shortened(name: str, limit: int) -> str:
    """The end of a long layer name, which tells it from its neighbours."""
    name = name or "(model)"
    return name if len(name) <= limit else "…" + name[-(limit - 1) :]


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _absent(value: Any) -> bool:
    return not isinstance(value, (int, float)) or not math.isfinite(value)
