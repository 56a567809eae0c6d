"""Blocks of a page are filled from results, and a page that differs is noticed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unmerge.bench import tables
from unmerge.errors import FileError
from unmerge.evaluation import Column, Evaluation, Figure, Table


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cells = {"un-edited": {"ToW": Figure(0.1)}, "unmerge": {"ToW": Figure(0.99)}}
    summary = Table("summary", [Column("ToW", "higher", 2)], cells)
    Evaluation({"summary": summary}, {}, {}).to_json(tmp_path / "results" / "small.json")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("before\n<!-- results:small -->\nold\n<!-- /results -->\nafter\n")
    return tmp_path


def test_a_block_is_replaced_and_the_rest_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables", "--root", str(root)])
    tables.main()
    text = (root / "README.md").read_text()
    assert text.startswith("before\n<!-- results:small -->\n|")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    assert "0.99" in text
    monkeypatch.setattr(sys, "argv", ["tables", "--root", str(root), "--check"])
    tables.main()  # nothing to change


def test_check_fails_where_a_page_differs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables", "--root", str(root), "--check"])
    with pytest.raises(SystemExit):
        tables.main()
    assert "old" in (root / "README.md").read_text()


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no"):
        tables.table("nothing", tmp_path)


def test_the_pages_of_the_project_show_their_results() -> None:
    root = Path(__file__).parent.parent.parent
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        assert tables.rendered(page.read_text(), root / "results") == page.read_text(), page.name
