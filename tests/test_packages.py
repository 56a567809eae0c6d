"""The packages import one way: from those above them in the map of the code, docs/extending.md, never from below."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "unmerge"
PARTS = sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")} - {"__init__.py", "__main__.py"})


def rows() -> list[list[str]]:
    """The packages and modules that each row of the map names."""
    text = (ROOT / "docs" / "extending.md").read_text()
    firsts = re.findall(r"^\| (`[^|]+) \|", text, flags=re.M)
    return [re.findall(r"`(\w+)/?`", first) for first in firsts]


def imported(node: ast.AST) -> Iterator[str]:
    """The parts of the package that a module imports when it is imported itself, or names the types of."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").partition(".")[0] == "unmerge":
            _, _, below = (child.module or "").partition(".")
            yield from [below.partition(".")[0]] if below else [alias.name for alias in child.names]
        elif not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from imported(child)


def test_the_map_names_every_part_once():
    assert sorted(name for row in rows() for name in row) == [name.removesuffix(".py") for name in PARTS]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_from_those_above_it(part):
    place = {name: number for number, row in enumerate(rows()) for name in row}
    own, found = place[part.removesuffix(".py")], set()
    for path in [SOURCE / part] if part.endswith(".py") else (SOURCE / part).rglob("*.py"):
        found |= set(imported(ast.parse(path.read_text()))) & place.keys()
    assert [name for name in found if place[name] > own] == []


def test_an_import_the_wrong_way_is_seen():
    when_imported = "from unmerge.cli import main\nfrom unmerge import tokens\n"
    later = "def f():\n    from unmerge.bench import digits\n"
    types = "if TYPE_CHECKING:\n    from unmerge.report import page\n"
    guarded = "try:\n    from unmerge.data.batches import size_of\nexcept ImportError:\n    pass\n"
    assert list(imported(ast.parse(when_imported + later + types + guarded))) == ["cli", "tokens", "report", "data"]
