"""kill -9 at many moments: the old result or the new one is there whole, and the next run goes on from what is done."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_place import TIMES, Task, tree

from unmerge.directories import _swap, taking_the_place_of
from unmerge.files import load_weights, read_tensors, replacing
from unmerge.leftovers import OLD, unfinished

KILLED = -9
MODEL = ("--model", "models:build", "--weights", "w.safetensors")
RUN = ("run", *MODEL, "--no-report", "--curve-samples", "20", "--overwrite")
OLD_RUN = (*RUN, "--data", "other.npz", "--forget", "label=1")
NEW_RUN = (*RUN, "--data", "digits.npz", "--forget", "label=3")
COLLECT = ("collect", *MODEL, "--overwrite")


def moments(asked: dict[str, Any], operations: int, times: int) -> Iterator[dict[str, Any]]:
    """Kill points of a task that was seen to its end: before some of its changes of files, and at random times."""
    if TIMES > 1:
        operations, times = asked["operations"], 10 * times
    count = min(operations, asked["operations"])
    for place in range(count):
        yield {"operation": 1 + place * asked["operations"] // count}
    draw = random.Random(0)
    for _ in range(times):
        yield {"seconds": draw.uniform(0, 1.1 * asked["seconds"])}


def whole(task: Task, *arguments: object, **how: Any) -> dict[str, Any]:
    ended = task(*arguments, **how)
    assert ended["code"] == 0
    return ended


def hidden(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if path.name.startswith(".")}


def edit_in(place: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an edit and its header, less the time that it took."""
    tensors, header = read_tensors(place / "edit" / "edit.safetensors", "edit")
    return tensors, {**header, "provenance": {**header["provenance"], "seconds": None}}


def same(one: tuple[dict[str, torch.Tensor], Any], other: tuple[dict[str, torch.Tensor], Any]) -> bool:
    """Bit for bit."""
    names = one[0].keys() == other[0].keys() and one[1] == other[1]
    return names and all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_run_and_its_resumption(task: Task, folder: Path, tmp_path: Path) -> None:
    asked = whole(task, *NEW_RUN, "--out", tmp_path / "expected")
    expected, files = edit_in(tmp_path / "expected"), tree(tmp_path / "expected").keys()
    whole(task, *OLD_RUN, "--out", tmp_path / "old")
    before = tree(tmp_path / "old")
    out, resumed = tmp_path / "there" / "out", 0
    for moment in moments(asked, 20, 8):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "old", out)
        ended = task(*NEW_RUN, "--out", out, **moment)
        assert ended["code"] in (KILLED, 0)
        is_old = tree(out) == before
        assert is_old or (tree(out).keys() == files and same(edit_in(out), expected)), moment
        if not is_old:
            continue  # and what is left of the last steps is for the next to clean
        whole(task, *NEW_RUN, "--out", out)
        assert same(edit_in(out), expected), moment
        assert hidden(out.parent) == set()
        resumed += json.loads((out / "run.json").read_text())["resumed"]
    assert resumed >= 5  # it did go on from finished passes


def test_collect(task: Task, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.safetensors"
    asked = whole(task, *COLLECT, "--data", "digits.npz", "--out", out)
    new = read_tensors(out, "statistics")
    whole(task, *COLLECT, "--data", "other.npz", "--out", out)
    raw, old = out.read_bytes(), read_tensors(out, "statistics")
    for moment in moments(asked, 7, 5):
        out.write_bytes(raw)
        assert task(*COLLECT, "--data", "digits.npz", "--out", out, **moment)["code"] in (KILLED, 0)
        found = read_tensors(out, "statistics")
        assert same(found, old) or same(found, new), moment
    whole(task, *COLLECT, "--data", "digits.npz", "--out", out)
    assert same(read_tensors(out, "statistics"), new)
    assert hidden(tmp_path) == set()


def test_apply(task: Task, folder: Path, tmp_path: Path) -> None:
    whole(task, *NEW_RUN, "--out", tmp_path / "run")
    command = ("apply", tmp_path / "run", *MODEL, "--overwrite")
    asked = whole(task, *command, "--to", tmp_path / "new")
    whole(task, *command, "--alpha", "0.5", "--to", tmp_path / "old")
    new, old = ((load_weights(tmp_path / name / "model.safetensors"), 0) for name in ("new", "old"))
    before, to = tree(tmp_path / "old"), tmp_path / "there" / "to"
    for moment in moments(asked, 9, 4):
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(tmp_path / "old", to)
        assert task(*command, "--to", to, **moment)["code"] in (KILLED, 0)
        if tree(to) != before:
            assert tree(to).keys() == tree(tmp_path / "new").keys()
            assert same((load_weights(to / "model.safetensors"), 0), new), moment
            assert json.loads((to / "unmerge.json").read_text())["alpha"] == 1
    whole(task, *command, "--to", to)
    assert not same(new, old)
    assert hidden(to.parent) == set()


def test_edit_checkpoint(task: Task, folder: Path, tmp_path: Path) -> None:
    whole(task, *NEW_RUN, "--out", tmp_path / "run")
    base = tmp_path / "base"
    base.mkdir()
    shutil.copyfile(folder / "w.safetensors", base / "model.safetensors")
    (base / "config.json").write_text("{}")
    before = tree(base)
    arguments = [str(base), str(tmp_path / "run" / "edit"), 1.0]
    asked = whole(task, checkpoint=[*arguments, str(tmp_path / "new")])
    to = tmp_path / "there" / "to"
    for moment in moments(asked, 9, 3):
        shutil.rmtree(to, ignore_errors=True)
        assert task(checkpoint=[*arguments, str(to)], **moment)["code"] in (KILLED, 0)
        assert tree(base) == before
        assert not to.exists() or tree(to) == tree(tmp_path / "new"), moment
    shutil.rmtree(to, ignore_errors=True)
    whole(task, checkpoint=[*arguments, str(to)])
    assert hidden(to.parent) == set()


def test_leftovers_of_the_dead_are_removed_and_of_the_living_not(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with unfinished(target) as alive, unfinished(target, is_directory=True) as alive_too:
        (tmp_path / ".file.abcdefgh.part").write_text("half")
        (tmp_path / ".file.abcdefg_.part").mkdir()
        others = [
            tmp_path / name for name in (".file.part", ".file.other.abcdefgh.part", ".fil.abcdefgh.part", "file.x")
        ]
        for other in others:
            other.write_text("somebody else's")
        with replacing(target) as part:
            part.write_text("new")
        assert set(tmp_path.iterdir()) == {target, alive, alive_too, *others}
    assert set(tmp_path.iterdir()) == {target, *others}


def test_without_an_exchange_in_one_step_the_old_directory_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmerge.directories._exchanged", lambda *_: False)
    target, part = tmp_path / "place", tmp_path / "part"
    for place in (target, part):
        place.mkdir()
        (place / place.name).touch()
    _swap(part, target)
    assert tree(target).keys() == {"part"}
    # As a kill between the two renames leaves it.
    aside = tmp_path / f".place.abcdefgh{OLD}"
    aside.mkdir()
    os.rename(target, aside / "old")
    with taking_the_place_of(target) as new:
        assert tree(target).keys() == {"part"}
        (new / "newer").touch()
    assert tree(tmp_path).keys() == {"place/newer"}
