"""What to type when a package of the report's extra is missing."""

from __future__ import annotations

from unmerge.errors import UnmergeError


class MissingExtra(UnmergeError, ImportError):
    """A package that only the report needs is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the report needs {package}. Type: pip install 'unmerge[report]'")
