"""The table of all methods: on digits, fast settings, with its summary."""

from __future__ import annotations

import pytest

from unmerge.bench.comparison import as_deep, compared
from unmerge.bench.networks import cifar_resnet
from unmerge.bench.tasks import digit_tasks, random_digits
from unmerge.evaluation import Evaluation


@pytest.fixture(scope="module")
def found() -> Evaluation:
    return compared(digit_tasks(((3,),))[0], fast=True)


def test_every_method_stands_beside_the_controls(found: Evaluation) -> None:
    rows = list(found["summary"].cells)
    assert rows[:4] == ["retrained", "un-edited", "logit mask", "head rows removed"]
    assert {"Kodge et al.", "paper pca", "paper cav-kmeans", "unmerge", "unmerge, no row removed"} <= set(rows)
    assert "paper cav-class" not in rows  # empty for a single class


def test_the_summary_repeats_the_figures_of_the_tables(found: Evaluation) -> None:
    row = found["summary"]["unmerge"]
    assert row["ToW"] == found["accuracy"]["unmerge"]["ToW"]
    assert row["feature gap"] == found["entanglement"]["unmerge"]["mean gap"]
    assert row["KL forget"] == found["fidelity"]["unmerge"]["KL forget"]
    assert row["seconds"].value > 0


def test_the_edit_is_near_retraining_where_a_mask_is_not(found: Evaluation) -> None:
    unmerge, mask = found["summary"]["unmerge"], found["summary"]["logit mask"]
    assert unmerge["ToW"].value > 0.98
    assert mask["ToW"].value > 0.98
    assert unmerge["feature gap"].value < 0.5 * mask["feature gap"].value


@pytest.mark.parametrize(("network", "skipped"), [("resnet50", [35, 40, 45]), ("resnet18", [13, 15, 17])])
def test_the_paper_s_depths_are_its_own_on_its_network_and_the_same_share_of_others(
    network: str, skipped: list[int]
) -> None:
    model = cifar_resnet(network, 10)
    assert [as_deep(model, skip) for skip in (35, 40, 45)] == skipped


def test_random_samples_make_no_class_request() -> None:
    task = random_digits(30)
    assert task.classes == ()
    assert sum(len(labels) for _, labels in task.forget) == 30
