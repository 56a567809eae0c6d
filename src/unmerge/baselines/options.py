"""Checks of the numbers and names that a baseline takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from unmerge.errors import UnmergeError, suggest


class BaselineError(UnmergeError):
    """An option of a baseline that does not exist or is out of its range, or a training that diverged."""


def check_number(name: str, value: Any, low: float, high: float = math.inf, above: bool = False) -> None:
    """Refuse what is not a finite number from `low` (or above it) to `high`."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above and value == low):
        start = f"above {low:g}" if above else f"from {low:g}"
        end = "" if high == math.inf else f" to {high:g}"
        raise BaselineError(f"{name}={value!r} is not a number {start}{end}.")


def check_count(name: str, value: Any, low: int) -> None:
    """Refuse what is not a whole number from `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise BaselineError(f"{name}={value!r} is not a whole number from {low}.")


def check_name(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse what is not one of some names."""
    known = list(known)
    if value not in known:
        raise BaselineError(f"{name}={value!r} is not one of {', '.join(repr(entry) for entry in known)}.")


def check_known(options: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an option that does not exist."""
    known = list(known)
    for name in options:
        if name not in known:
            raise BaselineError(f"there is no option {name!r}. {suggest(name, known)}")
