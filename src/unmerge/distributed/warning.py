"""A warning that a user sees once, at a line of their own code."""

from __future__ import annotations

import sys
import warnings

from unmerge.distributed.processes import is_first
from unmerge.errors import UnmergeWarning


def warn(message: str) -> None:
    """Warn at the line of the user's code that called into the package; of several processes the first does."""
    if not is_first():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "unmerge":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UnmergeWarning, stacklevel=level)
