"""Tables: aligned text, HTML and Markdown."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from unmerge.tables import html_table, markdown_table, text_table

words = st.text(st.characters(categories=("L", "N", "P", "S")), max_size=9)


class Cells(HTMLParser):
    """The text of every cell of a table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_first_column_is_to_the_left_and_the_others_to_the_right() -> None:
    found = text_table(["layer", "S", "fvar"], [["conv1", "0.125", "1"], ["a longer name", "2", "0.5"]])
    assert found.splitlines() == [
        "layer              S  fvar",
        "conv1          0.125     1",
        "a longer name      2   0.5",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert text_table(["alpha", "forget"], []) == "alpha  forget"
    assert Cells(html_table(["alpha", "forget"], [])).rows == [["alpha", "forget"]]
    assert markdown_table(["alpha", "forget"], []) == "| alpha | forget |\n|---|---:|"


def test_markdown_has_a_rule_below_its_head() -> None:
    found = markdown_table(["", "forget", "retain"], [["edit", "0.0", "98.1"]])
    assert found.splitlines() == ["|  | forget | retain |", "|---|---:|---:|", "| edit | 0.0 | 98.1 |"]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), columns=st.integers(1, 4), rows=st.integers(0, 4))
def test_every_cell_stands_in_its_place_whatever_it_holds(data: st.DataObject, columns: int, rows: int) -> None:
    row = st.lists(words, min_size=columns, max_size=columns)
    head, body = data.draw(row), data.draw(st.lists(row, min_size=rows, max_size=rows))
    assert Cells(html_table(head, body)).rows == [head, *body]
    lines = text_table(head, body).split("\n")
    widths = [max(len(line[place]) for line in (head, *body)) for place in range(columns)]
    for cells, line in zip((head, *body), lines, strict=True):
        line, start = line.ljust(sum(widths) + 2 * columns), 0
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            assert line[start : start + width] == (cell.ljust(width) if place == 0 else cell.rjust(width))
            start += width + 2


def test_html_cannot_be_broken_by_a_name() -> None:
    found = html_table(["<script>"], [["a & b </td>"]])
    assert "<script>" not in found
    assert Cells(found).rows == [["<script>"], ["a & b </td>"]]
