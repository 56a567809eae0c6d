"""Accuracy, groups and the identities of ToW."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmerge.errors import DataError
from unmerge.evaluation.accuracy import accuracy, compare, group_rows, observe, tug_of_war
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.subject import Setting, Subject

share = st.floats(0, 1)
three = st.fixed_dictionaries({"forget": share, "retain": share, "test": share})


def answers(labels: list[int], guesses: list[int], classes: int = 3) -> SplitOutputs:
    logits = torch.nn.functional.one_hot(torch.tensor(guesses), classes).float()
    return SplitOutputs(logits, torch.tensor(labels), torch.arange(len(labels)))


def test_accuracy_by_hand() -> None:
    assert accuracy(torch.tensor([[0.0, 2.0], [1.0, 0.0], [3.0, 1.0]]), torch.tensor([1, 1, 0])) == pytest.approx(2 / 3)


def test_tug_of_war_by_hand() -> None:
    own = {"forget": 0.1, "retain": 0.9, "test": 0.5}
    retrained = {"forget": 0.0, "retain": 1.0, "test": 0.7}
    assert tug_of_war(own, retrained) == pytest.approx(0.9 * 0.9 * 0.8)


@given(three, three)
def test_tug_of_war_is_one_for_equals_and_symmetric(own: dict[str, float], other: dict[str, float]) -> None:
    assert tug_of_war(own, own) == 1
    assert tug_of_war(own, other) == pytest.approx(tug_of_war(other, own))
    assert 0 <= tug_of_war(own, other) <= 1


def subjects() -> tuple[Subject, Subject]:
    own = {
        "forget": answers([0, 0, 0, 0], [0, 1, 1, 1]),
        "retain": answers([1, 1, 2, 2], [1, 1, 2, 1]),
        "test": answers([0, 1, 2, 2], [1, 1, 2, 2]),
    }
    retrained = own | {"forget": answers([0, 0, 0, 0], [1, 1, 1, 1]), "retain": answers([1, 1, 2, 2], [1, 1, 2, 2])}
    return Subject("own", Outputs(own)), Subject("retrained", Outputs(retrained))


def figures(row: dict) -> dict:
    return {column.label: figure for column, figure in row.items()}


def test_tables_with_a_reference() -> None:
    own, retrained = subjects()
    setting = Setting(groups={"class 2": ("retain", [2]), "first": ("test", torch.tensor([True, False, False, False]))})
    found = compare(observe(own, setting), observe(retrained, setting), setting)
    row = figures(found.rows["accuracy"])
    assert [row[name].value for name in ("forget", "retain", "test")] == [0.25, 0.75, 0.75]
    assert row["ToW"].value == pytest.approx(0.75 * 0.75 * 1)
    assert row["ToW"].low <= row["ToW"].value <= row["ToW"].high
    groups = figures(found.rows["groups"])
    assert (groups["class 2"].value, groups["first"].value) == (0.5, 0)
    assert not found.missing
    itself = compare(observe(retrained, setting), observe(retrained, setting), setting)
    tow = figures(itself.rows["accuracy"])["ToW"]
    assert (tow.low, tow.value, tow.high) == (1, 1, 1)


def test_without_reference_or_split_says_why() -> None:
    own, retrained = subjects()
    alone = compare(observe(own, Setting()), None, Setting())
    assert "reference" in alone.missing["ToW"]
    short = Subject("own", Outputs({name: part for name, part in own.outputs.splits.items() if name != "test"}))
    found = compare(observe(short, Setting()), observe(retrained, Setting()), Setting())
    assert "test split" in found.missing["ToW"]
    assert "retain" in figures(found.rows["accuracy"])


def test_groups_by_index_and_wrong_groups() -> None:
    own, _ = subjects()
    part = own.outputs["retain"]
    assert group_rows(part, torch.tensor([3, 1]), "g").tolist() == [3, 1]
    with pytest.raises(DataError, match="mask of 2 entries for a split of 4"):
        group_rows(part, torch.tensor([True, False]), "g")
    with pytest.raises(DataError, match="'g' is empty"):
        observe(own, Setting(groups={"g": ("retain", [0])}))
    with pytest.raises(DataError, match="Did you mean 'retain'"):
        observe(own, Setting(groups={"g": ("retains", [0])}))
