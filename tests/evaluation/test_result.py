"""Tables: best cells, and exports that parse back."""

import csv
import html.parser
import io
import json
import math
from pathlib import Path

import pytest

from unmerge.errors import DataError
from unmerge.evaluation import Column, Evaluation, Figure, Table


def example() -> Evaluation:
    columns = [
        Column("forget", "near", 2, True),
        Column("ToW", "higher", 4),
        Column("KL | 50 %_x", "lower"),
        Column("gap"),
    ]
    cells = {
        "retrained": {"forget": Figure(0.5, 0.4, 0.6), "ToW": Figure(1.0), "KL | 50 %_x": Figure(0.0)},
        "a<b": {
            "forget": Figure(0.48, 0.4, 0.56),
            "ToW": Figure(0.91234),
            "KL | 50 %_x": Figure(0.3),
            "gap": Figure(1),
        },
        "second_model": {"forget": Figure(0.1), "ToW": Figure(0.91231), "KL | 50 %_x": Figure(0.2)},
        "c|d": {"forget": Figure(0.52), "ToW": Figure(0.5), "KL | 50 %_x": Figure(math.nan)},
    }
    table = Table("accuracy", columns, cells, ["retrained"], "retrained")
    return Evaluation({"accuracy": table}, {"relearning": "no module"}, {"seed": 3, "level": 0.95})


def test_best_cells() -> None:
    table = example()["accuracy"]
    near, higher, lower, none = table.columns
    assert table.best(near) == ["a<b", "c|d"]  # as far from .5 on either side
    assert table.best(higher) == ["a<b", "second_model"]  # equal as printed
    assert table.best(lower) == ["second_model"]
    assert table.best(none) == []
    without = Table("t", [near], {name: row for name, row in table.cells.items() if name != "retrained"})
    assert without.best(near) == []
    alike = Table("t", [higher], {"a": {"ToW": Figure(0.5)}, "b": {"ToW": Figure(0.5)}})
    assert alike.best(higher) == []


def test_text_is_aligned() -> None:
    lines = str(example()).splitlines()
    assert lines[0] == "accuracy"
    assert "second_model" in lines[5]
    assert "48.00* ±8.00" in lines[4]
    assert "0.9123*" in lines[4]
    assert "0.9123*" in lines[5]
    assert lines[6].split()[-1] == "–"
    assert len({line.rstrip().find("0.") > 0 for line in lines[3:7]}) == 1
    assert lines[-1] == "- relearning: no module"


def test_wide_tables_turn() -> None:
    columns = [Column(f"a rather long name {place}") for place in range(9)]
    cells = {name: {column.label: Figure(0.5) for column in columns} for name in ("one", "two")}
    text = str(Evaluation({"t": Table("t", columns, cells)}, {}, {}))
    assert text.splitlines()[1].split() == ["one", "two"]


def test_json_round_trip(tmp_path: Path) -> None:
    result = example()
    written = result.to_json(tmp_path / "r.json")
    assert json.loads(written) == json.loads((tmp_path / "r.json").read_text()) == result.to_dict()
    again = Evaluation.from_dict(json.loads(written))
    assert again.to_dict() == result.to_dict()
    assert str(again) == str(result)
    assert json.loads(written)["tables"]["accuracy"]["rows"]["c|d"]["KL | 50 %_x"]["value"] is None
    assert json.loads(written)["settings"]["seed"] == 3


def test_csv_parses_back(tmp_path: Path) -> None:
    result = example()
    lines = list(csv.DictReader(io.StringIO(result.to_csv(tmp_path / "r.csv"))))
    assert (tmp_path / "r.csv").read_text() == result.to_csv()
    assert len(lines) == 13
    found = next(line for line in lines if (line["model"], line["figure"]) == ("a<b", "forget"))
    assert (float(found["value"]), float(found["low"]), float(found["high"]), found["best"]) == (0.48, 0.4, 0.56, "1")


@pytest.mark.parametrize(("layout", "shape"), [("rows", (6, 5)), ("columns", (6, 5))])
def test_markdown_parses_back(layout: str, shape: tuple[int, int]) -> None:
    lines = [line for line in example().to_markdown(models_as=layout).splitlines() if line.startswith("|")]
    cells = [line.strip("| ").replace(r"\|", "/").split(" | ") for line in lines]
    assert len(lines) == shape[0]
    assert {line.replace(r"\|", "").count("|") for line in lines} == {shape[1] + 1}
    assert "**48.00** ±8.00" in [cell for line in cells for cell in line]


def test_the_sign_of_intervals_is_explained_where_there_are_some() -> None:
    assert "± half of a 95 % bootstrap interval." in example().to_markdown()
    bare = Evaluation({"t": Table("t", [Column("ToW", "higher", 4)], {"edited": {"ToW": Figure(0.9)}})}, {}, {})
    for shown in (bare.to_markdown(), str(bare)):
        assert "↑ higher" in shown
        assert "±" not in shown


def test_arrows_are_explained_where_there_are_some() -> None:
    for better, legend in (("lower", True), (None, False)):
        seconds = Table("times", [Column("seconds", better)], {"step": {"seconds": Figure(1.0)}})
        shown = Evaluation({"times": seconds}, {}, {})
        assert ("better" in shown.to_markdown()) == legend
        assert ("* best" in repr(shown)) == legend


def test_latex_escapes_and_has_as_many_cells() -> None:
    source = example().to_latex()
    body = [line for line in source.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in body} == {4}
    assert r"second\_model" in source
    assert r"50 \%\_x" in source
    assert r"\textbf{48.00}\,$\pm$\,8.00" in source
    assert source.count(r"\begin{tabular}{l|cccc}") == source.count(r"\end{tabular}") == 1
    assert "% relearning: no module" in source


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells.append(data)


def test_html_is_well_formed() -> None:
    tags = Tags()
    tags.feed(example()._repr_html_())
    assert tags.open == []
    assert "a<b" in tags.cells
    assert "48.00 ±8.00" in tags.cells


def test_unknown_names_are_answered_with_near_ones() -> None:
    result = example()
    with pytest.raises(DataError, match="Did you mean 'accuracy'"):
        result["acuracy"]
    with pytest.raises(DataError, match="because no module"):
        result["relearning"]
    with pytest.raises(DataError, match="Did you mean 'second_model'"):
        result["accuracy"]["second"]
