"""Two commands at the same time, on one statistics file and in one folder, do not disturb each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reliability_place import Task, tree

import unmerge
from unmerge.errors import FileError
from unmerge.storage.directories import taking_the_place_of
from unmerge.storage.files import read_tensors

MODEL = ("--model", "tiny_models:build", "--weights", "w.safetensors")
RUN = ("run", *MODEL, "--data", "digits.npz", "--no-report", "--curve-samples", "20")


def edit(place: Path) -> dict[str, torch.Tensor]:
    return read_tensors(place / "edit" / "edit.safetensors", "edit")[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_requests_share_statistics_and_a_folder(task: Task, tmp_path: Path) -> None:
    known = tmp_path / "all.safetensors"
    assert task("collect", *MODEL, "--data", "digits.npz", "--out", known)["code"] == 0
    before = known.read_bytes()
    commands = {
        label: [*RUN, "--forget", f"label={label}", "--statistics", str(known), "--out"] for label in ("3", "5")
    }
    for label, command in commands.items():
        assert task(*command, tmp_path / f"alone-{label}")["code"] == 0
    for turn in range(2):
        outs = {label: tmp_path / "runs" / f"{label}-{turn}" for label in commands}
        both = task(*commands["3"], outs["3"], together=[*commands["5"], str(outs["5"])])
        assert (both["code"], both["others"]) == (0, [0])
        for label, out in outs.items():
            assert same(edit(out), edit(tmp_path / f"alone-{label}"))
            assert unmerge.Statistics.load(out / "statistics.safetensors").samples == 150
    assert known.read_bytes() == before
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name.startswith(".")]


def test_of_two_runs_to_one_directory_one_is_refused_and_the_other_whole(task: Task, tmp_path: Path) -> None:
    command = [*RUN, "--forget", "label=3", "--out"]
    assert task(*command, tmp_path / "alone")["code"] == 0
    for turn in range(2):
        out = tmp_path / "runs" / str(turn)
        both = task(*command, out, together=[*command, str(out)])
        assert sorted([both["code"], *both["others"]]) == [0, 1]
        assert tree(out).keys() == tree(tmp_path / "alone").keys()
        assert same(edit(out), edit(tmp_path / "alone"))
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name.startswith(".")]


def test_a_directory_that_was_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "place"

    def fill() -> None:
        with taking_the_place_of(target) as part:
            (part / "mine").touch()
            target.mkdir()
            (target / "theirs").touch()

    with pytest.raises(FileError, match="was written by another process meanwhile"):
        fill()
    assert tree(tmp_path).keys() == {"place/theirs"}
