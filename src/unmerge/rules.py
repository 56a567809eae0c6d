"""What a field of a recipe accepts."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a field accepts: one of some words, or a number of a type within bounds."""

    words: tuple[str, ...] = ()
    number: type | None = None
    low: float = -math.inf
    optional: bool = False

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, str):
            return value in self.words
        if self.number is None or isinstance(value, bool):
            return False
        is_number = isinstance(value, Integral if self.number is int else Real)
        return is_number and self.low <= value and abs(value) <= sys.float_info.max

    def __str__(self) -> str:
        parts = [repr(word) for word in self.words]
        if self.number is not None:
            kind = "a whole number" if self.number is int else "a number"
            bounds = f" from {self.low:g}" if math.isfinite(self.low) else ""
            parts.append(kind + bounds)
        if self.optional:
            parts.append("None")
        return " or ".join(parts) if len(parts) < 3 else "one of " + ", ".join(parts)
