"""kill -9 at many moments: the old result or the new one is there whole, and the next run goes on from what is done."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from reliability_place import TIMES, Task, tree

from unmerge.collecting.statistics import Statistics
from unmerge.storage.files import load_weights, read_tensors

KILLED = -9
RANDOM = 13  # random times in each of the four tasks
MODEL = ("--model", "tiny_models:build", "--weights", "w.safetensors")
RUN = ("run", *MODEL, "--no-report", "--curve-samples", "20", "--overwrite")
OLD_RUN = (*RUN, "--data", "other.npz", "--forget", "label=1")
NEW_RUN = (*RUN, "--data", "digits.npz", "--forget", "label=3")
COLLECT = ("collect", *MODEL, "--overwrite")


def moments(asked: dict[str, Any], operations: int) -> Iterator[dict[str, Any]]:
    """Kill points of a task that was seen to its end: at its renames and writes, some other changes, random times."""
    events = asked["operations"]
    decisive = [place for place, event in enumerate(events, 1) if event in ("os.rename", "save")]
    others = [place for place in range(1, len(events) + 1) if place not in decisive]
    if TIMES == 1:
        others = others[:: -(-len(others) // operations)]
    for place in sorted([*decisive, *others]):
        yield {"operation": place}
    draw = random.Random(0)
    for _ in range(RANDOM if TIMES == 1 else 3 * RANDOM):
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


def fresh(folder: Path, copied: Path | None = None) -> Path:
    """A new folder with a copy of an old result, so that the operations of a task are those that were counted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if copied is not None and copied.is_dir():
        shutil.copytree(copied, folder / "out")
    elif copied is not None:
        shutil.copyfile(copied, folder / "out")
    return folder / "out"


def passes_kept_beside(out: Path) -> int:
    """The samples of the passes that a killed run had finished."""
    return sum(Statistics.load(path).samples for path in (out.parent / f".{out.name}.resume").glob("*.safetensors"))


def test_run_and_its_resumption(task: Task, tmp_path: Path) -> None:
    old, there = tmp_path / "old", tmp_path / "there"
    whole(task, *OLD_RUN, "--out", old)
    out = fresh(there, old)
    asked = whole(task, *NEW_RUN, "--out", out)
    expected, files, skipped = edit_in(out), tree(out).keys(), set()
    for moment in moments(asked, 6):
        out = fresh(there, old)
        assert task(*NEW_RUN, "--out", out, **moment)["code"] in (KILLED, 0)
        is_old = tree(out) == tree(old)
        assert is_old or (tree(out).keys() == files and same(edit_in(out), expected)), moment
        kept = passes_kept_beside(out)
        again = whole(task, *NEW_RUN, "--out", out)
        assert hidden(there) == set()
        if is_old:
            assert same(edit_in(out), expected), moment
            # A pass also shows the model its first samples, to see what its layers get.
            assert again["samples"] <= asked["samples"] - kept, moment
            skipped.add(kept)
    everything = Statistics.load(out / "statistics.safetensors").samples
    assert {0, everything} < skipped  # killed before, between and after the two passes


def test_collect(task: Task, tmp_path: Path) -> None:
    old, there = tmp_path / "old", tmp_path / "there"
    command = (*COLLECT, "--data", "digits.npz", "--out")
    whole(task, *COLLECT, "--data", "other.npz", "--out", old)
    out = fresh(there, old)
    asked = whole(task, *command, out)
    new, before = read_tensors(out, "statistics"), read_tensors(old, "statistics")
    for moment in moments(asked, 9):
        out = fresh(there, old)
        assert task(*command, out, **moment)["code"] in (KILLED, 0)
        found = read_tensors(out, "statistics")
        assert same(found, before) or same(found, new), moment
        whole(task, *command, out)
        assert same(read_tensors(out, "statistics"), new)
        assert hidden(there) == set()


def test_apply(task: Task, tmp_path: Path) -> None:
    whole(task, *NEW_RUN, "--out", tmp_path / "run")
    old, there = tmp_path / "old", tmp_path / "there"
    command = ("apply", tmp_path / "run", *MODEL, "--overwrite", "--to")
    whole(task, *command, old, "--alpha", "0.5")
    out = fresh(there, old)
    asked = whole(task, *command, out)
    new, files = load_weights(out / "model.safetensors"), tree(out).keys()
    for moment in moments(asked, 6):
        out = fresh(there, old)
        assert task(*command, out, **moment)["code"] in (KILLED, 0)
        if tree(out) != tree(old):
            assert tree(out).keys() == files, moment
            assert same((load_weights(out / "model.safetensors"), None), (new, None)), moment
            assert json.loads((out / "unmerge.json").read_text())["alpha"] == 1
        whole(task, *command, out)
        assert hidden(there) == set()


def test_edit_checkpoint(task: Task, folder: Path, tmp_path: Path) -> None:
    whole(task, *NEW_RUN, "--out", tmp_path / "run")
    base, there = tmp_path / "base", tmp_path / "there"
    base.mkdir()
    shutil.copyfile(folder / "w.safetensors", base / "model.safetensors")
    (base / "config.json").write_text("{}")
    before = tree(base)
    out = fresh(there)
    arguments = [str(base), str(tmp_path / "run" / "edit"), 1.0, str(out)]
    asked = whole(task, checkpoint=arguments)
    new = tree(out)
    for moment in moments(asked, 8):
        fresh(there)
        assert task(checkpoint=arguments, **moment)["code"] in (KILLED, 0)
        assert tree(base) == before
        assert not out.exists() or tree(out) == new, moment
        shutil.rmtree(out, ignore_errors=True)
        whole(task, checkpoint=arguments)
        assert tree(there) == {f"out/{name}": content for name, content in new.items()}
