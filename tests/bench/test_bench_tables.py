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


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Two requests, of which the second has a row more."""
    columns = [Column("ToW", "higher", 3), Column("KL", "lower", 1)]
    for name, cells in (
        ("trees", {"mask": (0.9, 2.0), "unmerge": (0.98, 1.0)}),
        ("wolf", {"mask": (0.8, 1.0), "unmerge": (1.0, 2.0), "paper": (0.5, 9.0)}),
    ):
        rows = {row: {"ToW": Figure(first, 0.1, 0.2), "KL": Figure(second)} for row, (first, second) in cells.items()}
        found = {title: Table(title, shown, rows) for title, shown in (("summary", columns), ("fidelity", columns[1:]))}
        Evaluation(found, {}, {}).to_json(tmp_path / f"{name}-zero.json")
    return tmp_path


def test_means_over_several_results_are_of_the_rows_that_all_have(several: Path) -> None:
    lines = tables.table("*-zero", several).splitlines()
    assert lines[2:4] == ["| mask | 0.850 | 1.5 |", "| unmerge | **0.990** | 1.5 |"]
    assert not any("paper" in line for line in lines)


def test_a_row_of_several_results_has_their_mean_and_deviation_below(several: Path) -> None:
    assert tables.table("*-zero@unmerge", several).splitlines()[2:6] == [
        "| trees | 0.980 | 1.0 |",
        "| wolf | 1.000 | 2.0 |",
        "| mean | 0.990 | 1.5 |",
        "| deviation | 0.014 | 0.7 |",
    ]
    assert tables.table("*-[z]ero@unmerge", several).splitlines()[2].startswith("| trees-zero |"), "several ends"
    assert [line.split(" | ")[0] for line in tables.table("*-zero@paper", several).splitlines()[2:5]] == [
        "| wolf",
        "| mean",
        "",
    ]
    for name in ("*-zero@nobody", "*-pretrained"):
        with pytest.raises(FileError, match="a page shows"):
            tables.table(name, several)


def test_several_results_may_show_another_table_than_their_summary(several: Path) -> None:
    assert tables.table("*-zero:fidelity", several).splitlines()[2:4] == ["| mask | 1.5 |", "| unmerge | 1.5 |"]
    assert tables.table("*-zero:fidelity@paper", several).splitlines()[2] == "| wolf | 9.0 |"


def test_a_row_that_some_results_have_is_lent_to_others(several: Path) -> None:
    lines = tables.table("trees-zero with *-zero@paper", several).splitlines()
    assert lines[2] == "| paper (wolf) | 0.500 | 9.0 |"
    assert lines[4].startswith("| unmerge | **0.980**")
    assert tables.table("*-zero with *-zero@mask", several).splitlines()[2] == "| mask (trees, wolf) | 0.850 | 1.5 |"
    with pytest.raises(FileError, match="'nobody'"):
        tables.table("*-zero with *-zero@nobody", several)
    for borrowed in ("*-zero", "wolf-zero@paper"):
        with pytest.raises(FileError, match="expected NAMES@ROW"):
            tables.table(f"trees-zero with {borrowed}", several)


def test_a_row_of_other_requests_shows_only_what_is_measured_against_their_reference(tmp_path: Path) -> None:
    columns = [Column("test", "near", 1), Column("ToW", "higher", 3), Column("ECE", "lower", 1)]
    for name, rows in (("trees", ["retrained", "again"]), ("wolf", ["retrained"])):
        cells = {row: {"test": Figure(7.0), "ToW": Figure(1.0 if row == "retrained" else 0.9)} for row in rows}
        cells = {row: {**own, "ECE": Figure(0.3)} for row, own in cells.items()}
        found = Table("summary", columns, cells, rows, "retrained")
        Evaluation({"summary": found}, {}, {}).to_json(tmp_path / f"{name}.json")
    assert tables.table("wolf with *@again", tmp_path).splitlines()[3] == "| again (trees) | – | 0.900 | – |"


def test_rows_of_several_runs_stand_in_one_table_where_they_have_one_reference(tmp_path: Path) -> None:
    columns = [Column("ToW", "higher", 2), Column("test", "near", 1)]
    for name, test, own in (
        ("controls", 7.0, {"mask": 0.9}),
        ("edits", 7.0, {"unmerge": 0.95}),
        ("repeated", 7.0, {"mask": 0.8}),
        ("strange", 8.0, {"paper": 0.9}),
    ):
        cells = {"retrained": {"ToW": Figure(1.0), "test": Figure(test)}}
        cells |= {row: {"ToW": Figure(value)} for row, value in own.items()}
        summary = Table("summary", columns, cells, ["retrained"], "retrained")
        Evaluation({"summary": summary}, {}, {}).to_json(tmp_path / f"{name}.json")
    assert tables.table("controls + edits", tmp_path).splitlines()[2:5] == [
        "| retrained | 1.00 | 7.0 |",
        "| mask | 0.90 | – |",
        "| unmerge | **0.95** | – |",
    ]
    for others, said in (("strange", "retrained is not"), ("edits + repeated", "mask is not"), ("none", "there is no")):
        with pytest.raises(FileError, match=said):
            tables.table(f"controls + {others}", tmp_path)


def test_some_columns_may_be_shown_alone(several: Path) -> None:
    assert tables.table("trees-zero showing KL", several).splitlines()[:3] == [
        "|  | KL ↓ |",
        "| --- | ---: |",
        "| mask | 2.0 |",
    ]
    with pytest.raises(FileError, match="Did you mean 'ToW'"):
        tables.table("*-zero showing KL, Tow", several)


def test_some_rows_may_be_shown_alone(several: Path) -> None:
    assert tables.table("trees-zero only mask showing KL", several).splitlines()[:3] == [
        "|  | KL ↓ |",
        "| --- | ---: |",
        "| mask | 2.0 |",
    ]
    with pytest.raises(FileError, match="Did you mean 'mask'"):
        tables.table("*-zero only masc as a mask", several)
    for twice in ("mask | mask as another", "mask | unmerge as mask"):
        with pytest.raises(FileError, match="twice"):
            tables.table(f"*-zero only {twice}", several)


def test_a_page_may_call_rows_by_other_names_and_they_compete_as_before(tmp_path: Path) -> None:
    columns = [Column("ToW", "higher", 2), Column("test", "near", 1)]
    cells = {
        row: {"ToW": Figure(tow), "test": Figure(test)}
        for row, tow, test in (("retrained", 1.0, 7.0), ("mask", 0.9, 7.2), ("edit, twice", 0.8, 8.0))
    }
    summary = Table("summary", columns, cells, ["retrained"], "retrained")
    Evaluation({"summary": summary}, {}, {}).to_json(tmp_path / "trees.json")
    assert tables.table("trees only edit, twice as unmerge | retrained as the goal | mask", tmp_path).splitlines()[
        2:5
    ] == [
        "| unmerge | 0.80 | 8.0 |",
        "| the goal | 1.00 | 7.0 |",
        "| mask | **0.90** | **7.2** |",
    ]


def test_a_folder_without_the_pages_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables", "--check", "--root", str(tmp_path)])
    with pytest.raises(SystemExit):
        tables.main()
    assert "pass --root" in capsys.readouterr().err


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no"):
        tables.table("nothing", tmp_path)


def test_the_pages_of_the_project_show_their_results() -> None:
    root = Path(__file__).parent.parent.parent
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        assert tables.rendered(page.read_text(), root / "results") == page.read_text(), page.name
