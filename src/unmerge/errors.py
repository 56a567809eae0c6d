"""The errors that unmerge raises on its own account; what the user's own data or functions raise passes unchanged."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class UnmergeError(ValueError):
    """Base of all errors below."""


class RecipeError(UnmergeError):
    """A recipe field that does not exist or a value out of its range."""


class LayerError(UnmergeError):
    """A layer that cannot be found, or cannot be edited as it is."""


class DataError(UnmergeError):
    """Batches that are empty, unlabelled where labels are needed, not readable twice, or not what the model takes."""


class StatisticsError(UnmergeError):
    """Statistics that do not belong together, or not to this model."""


class InitError(UnmergeError):
    """Initial weights that do not fit the model."""


class EditError(UnmergeError):
    """An edit that cannot be applied, reverted or composed."""


class FileError(UnmergeError):
    """A file that is missing, damaged or of another kind."""


class RankError(UnmergeError):
    """One of several processes that has failed or ended, or that sees other data or weights than the rest."""


class UnmergeWarning(UserWarning):
    """Something was left out or reduced; the message says what."""


def suggest(found: str, known: Iterable[str]) -> str:
    """A sentence with the names nearest to `found`, or with all of them where none is near."""
    options = list(known)
    near = difflib.get_close_matches(found, options, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(name) for name in near)}?"
    shown = ", ".join(repr(name) for name in options[:12])
    more = f" and {len(options) - 12} more" if len(options) > 12 else ""
    return f"There are: {shown}{more}."


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message, shortened when there are many."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reasons(left_out: Mapping[str, str]) -> str:
    """What was left out and why, for a message: each reason once."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(repr(name))
    return "; ".join(f"{listing(those)} {reason}" for reason, those in names.items())
