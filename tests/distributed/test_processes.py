"""Two and three real processes give what one gives, bit for bit alike among themselves, and fail together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import processes
import pytest
from comparing import check_close

DATA = [
    "a_list",
    "full_classes",
    "a_sample",
    "the_first_rows",
    "fewer_batches_than_processes",
    "without_labels",
    "shuffled",
    "with_a_worker",
    "augmented",
    "a_stream",
    "sampler",
    "dealt_by_a_sampler",
    "dealt_to_some",
    "drawn_at_random",
    "more_processes_than_samples",
    "accelerated",
    "own_shares",
    "classes_of_one_process_each",
]
REQUESTS = [
    "an_edit",
    "an_edit_with_a_verdict",
    "kmeans",
    "within_memory",
    "sketched",
    "strengths",
    "recalibrated",
    "refitted",
    "evaluated",
    "sharded",
    "answers",
]
SINGLE = [
    "edits_in_single_precision",
    "edits_of_convolutions_in_single_precision",
    "edits_of_transformers_in_single_precision",
    "a_sketched_edit_in_single_precision",
    "sharded_decoders_in_single_precision",
]
DEALT = "edits_of_dealt_samples_in_single_precision"
ALIKE = [DEALT, "the_same_bits", "a_verdict_of_dealt_samples"]
WRONG = {
    "other_weights": "different weights",
    "other_data": "do not see the same batches",
    "other_datasets": "do not see the same batches",
    "other_kinds": "data of different kinds",
    "one_failure": "the disk is gone",
    "one_failure_of_all": "NaN",
    "one_failure_while_applying": "the disk is gone",
    "one_failure_while_diagnosing": "the disk is gone",
    "one_that_cannot_travel": "pickle",
    "nothing_at_all": "gave no batch",
    "wrapped": "model.module",
    "split_layers": "tensor parallelism",
    "first_rows_of_shares": "without a DistributedSampler",
    "an_accelerated_stream": "accelerator.prepare",
    "other_sampler": "but there are",
    "other_epoch": "epoch",
    "dealt_with_repetition": "1 of 17 go to more than one process, such as index 0,",
    "endless": "had not ended",
}
# How near what several processes give is to what one gives.
WITHIN = {
    **dict.fromkeys([*DATA, *REQUESTS], 1e-5),
    **dict.fromkeys(SINGLE, 1e-6),  # but for the last bit of a sum, here and there, the same
    DEALT: 1e-5,  # batches of other samples
    **dict.fromkeys(["an_edit", "sharded_decoders"], 1e-9),  # edits in double precision
}
NAMES = [*DATA, *REQUESTS, *SINGLE, "sharded_decoders", *ALIKE, *WRONG, "written", "exported", "by_itself", "an_end"]
# Three processes do what differs from two: shares that no two processes cover, and uneven parts of a weight.
NAMES_OF_THREE = [*(name for name in DATA if name != "accelerated"), *SINGLE, DEALT, "an_edit", "sharded"]
NAMES_OF_THREE += ["one_failure", "dealt_with_repetition", "an_end"]


Run = Callable[[int], list[dict[str, Any]]]


def of(names: Iterable[str]) -> Any:
    """Both numbers of processes with the functions that they run."""
    pairs = [(2, name) for name in names] + [(3, name) for name in names if name in NAMES_OF_THREE]
    return pytest.mark.parametrize(("world", "name"), pairs)


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Run:
    """What each function returned in each process; one start of so many processes serves all tests."""
    names = {2: NAMES, 3: NAMES_OF_THREE}
    return functools.cache(lambda world: processes.run(world, names[world], tmp_path_factory.mktemp("processes")))


@pytest.fixture
def found(run: Run, world: int, name: str) -> list[Any]:
    """What one function returned in each process."""
    return [own[name] for own in run(world)]


@pytest.fixture(scope="module")
def alone() -> Callable[[str], Any]:
    """What it returns in one process."""
    return functools.cache(processes.attempt)


@of(WITHIN)
def test_several_processes_give_what_one_gives(found, alone, name):
    expected = alone(name)
    assert not isinstance(expected, str), expected
    for own in found:
        check_close(own, expected, WITHIN[name])


@of([*DATA, *REQUESTS, *SINGLE, "sharded_decoders", *ALIKE])
def test_every_process_ends_with_the_same_bits(found, name):
    for own in found[1:]:
        check_close(own, found[0], 0.0)


@of(WRONG)
def test_what_is_wrong_in_one_process_ends_all(found, name):
    for own in found:
        assert isinstance(own, str), own
        assert WRONG[name] in own


@of(["one_failure"])
def test_the_process_that_failed_has_its_own_error(found, name):
    assert found[1] == "ValueError: the disk is gone"
    assert found[0].startswith("RankError: process 1 of ")


def test_a_failure_between_two_sums_ends_all_within_patience(tmp_path):
    name = "one_failure_while_adding"
    first, second = (own[name] for own in processes.run(2, [name], tmp_path))
    assert second == "MemoryError: nothing is left"
    assert first.startswith("RankError: another process has ended")


@of(["written"])
def test_the_first_process_alone_writes(found, name):
    assert found[0]["files"] == ["edit.json", "edit.safetensors", "statistics.safetensors"]
    assert all(own["files"] == [] for own in found[1:])


@of(["exported"])
def test_exports_are_written_by_the_first_process_which_waits_for_no_other(found, alone, name):
    expected = alone(name)
    assert expected["files"] == [
        "adapter",
        "again",
        "base",
        "diagnosis.json",
        "edited",
        "evaluation.csv",
        "evaluation.json",
    ]
    check_close(found[0], expected, 1e-5)
    for own in found[1:]:
        check_close(own, {**found[0], "files": ["base"], "survived": {}}, 0.0)


@of(["by_itself"])
def test_one_process_can_work_by_itself(found, alone, name):
    check_close(found[0], alone(name), 1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_a_process_that_dies_ends_the_others_at_once(run, world):
    *others, dead = run(world)
    assert "an_end" not in dead
    for own in others:
        assert "has ended" in own["an_end"]["error"]
        assert own["an_end"]["seconds"] < 20
