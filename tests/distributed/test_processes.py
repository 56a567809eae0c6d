"""Two and three real processes give what one gives, bit for bit alike among themselves, and fail together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import Tensor

DATA = [
    "a_list",
    "full_classes",
    "a_sample",
    "the_first_rows",
    "fewer_batches_than_processes",
    "without_labels",
    "shuffled",
    "with_a_worker",
    "a_stream",
    "sampler",
    "more_processes_than_samples",
    "accelerated",
    "own_shares",
    "classes_of_one_process_each",
]
REQUESTS = [
    "an_edit",
    "an_edit_in_single_precision",
    "an_edit_with_a_verdict",
    "kmeans",
    "within_memory",
    "strengths",
    "recalibrated",
    "evaluated",
    "sharded",
]
ALIKE = ["the_same_bits", "a_verdict_of_dealt_samples"]
WRONG = {
    "other_weights": "different weights",
    "other_data": "do not see the same batches",
    "other_kinds": "data of different kinds",
    "one_failure": "the disk is gone",
    "one_failure_of_all": "NaN",
    "nothing_at_all": "gave no batch",
    "wrapped": "model.module",
    "first_rows_of_shares": "without a DistributedSampler",
    "an_accelerated_stream": "accelerator.prepare",
    "other_sampler": "but there are",
    "other_epoch": "epoch",
}
OTHERS = ["written", "by_itself"]
NAMES = [*DATA, *REQUESTS, *ALIKE, *WRONG, *OTHERS, "an_edit"]


@pytest.fixture(scope="module", params=[2, 3])
def found(request: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What each function returned in each process; one start of the processes serves all tests."""
    return processes.run(request.param, NAMES, tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


def check_close(found: Any, expected: Any, tolerance: float, place: str = "") -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict), f"{place}: {found}"
        assert list(found) == list(expected), place
        for key, value in expected.items():
            check_close(found[key], value, tolerance, f"{place}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            check_close(found[index], value, tolerance, f"{place}/{index}")
    elif isinstance(expected, (Tensor, float)) and expected is not None:
        found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        assert found.shape == expected.shape, place
        if expected.numel():
            assert (found - expected).abs().max() <= tolerance * max(1e-3, expected.abs().max().item()), place
    else:
        assert found == expected, place


@pytest.mark.parametrize("name", [*DATA, *REQUESTS])
def test_several_processes_give_what_one_gives(found, expected, name):
    if name not in expected:
        expected[name] = processes.attempt(name)
    assert not isinstance(expected[name], str), expected[name]
    for own in found:
        check_close(own[name], expected[name], 1e-5)


@pytest.mark.parametrize("name", [*DATA, *REQUESTS, *ALIKE])
def test_every_process_ends_with_the_same_bits(found, name):
    for own in found[1:]:
        check_close(own[name], found[0][name], 0.0)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_process_ends_all(found, name):
    for own in found:
        assert isinstance(own[name], str), own[name]
        assert WRONG[name] in own[name]


def test_the_process_that_failed_has_its_own_error(found):
    assert found[1]["one_failure"] == "ValueError: the disk is gone"
    assert found[0]["one_failure"].startswith("RankError: process 1 of ")


def test_the_first_process_alone_writes(found):
    assert found[0]["written"]["files"] == ["edit.json", "edit.safetensors", "statistics.safetensors"]
    assert all(own["written"]["files"] == [] for own in found[1:])


def test_one_process_can_work_by_itself(found):
    check_close(found[0]["by_itself"], processes.attempt("by_itself"), 1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_a_process_that_dies_ends_the_others_at_once(tmp_path: Path, world: int):
    found = processes.run(world, ["an_end"], tmp_path)
    assert found.pop() == {}
    for own in found:
        assert "has ended" in own["an_end"]["error"]
        assert own["an_end"]["seconds"] < 20
