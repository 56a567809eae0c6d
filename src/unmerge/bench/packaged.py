"""Weights that installed packages carry; the packages are only looked up, never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from unmerge.errors import FileError


def packaged(package: str, pattern: str, otherwise: str) -> Path:
    """The file of a package that fits a pattern; where there is none, an error with what to do otherwise."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for path in sorted(Path(folder).glob(pattern)):
            return path
    raise FileError(f"no checkpoint was named, and the package that carries one is not installed. {otherwise}")
