"""What killed processes left is told from what living ones write."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

from unmerge.storage.directories import taking_the_place_of
from unmerge.storage.files import read_tensors, replacing, write_tensors
from unmerge.storage.leftovers import OLD, sweep, unfinished


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_leftovers_of_the_dead_are_removed_and_of_the_living_not(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with unfinished(target) as alive:
        (tmp_path / ".file.abcdefgh.part").write_text("half")
        (tmp_path / ".file.abcdefg_.part").mkdir()
        others = {".file.part", ".file.other.abcdefgh.part", ".fil.abcdefgh.part", "file.x", ".file.ABCDEFGH.part"}
        for other in others:
            (tmp_path / other).write_text("somebody else's")
        with replacing(target) as part:
            part.write_text("new")
        assert names(tmp_path) == {"file", alive.name, *others}
    assert names(tmp_path) == {"file", *others}


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    target = tmp_path / "file"
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with unfinished(target):
            os.write(tell, b"there")
            signal.pause()
    assert os.read(told, 5) == b"there"
    sweep(target)
    assert len(names(tmp_path)) == 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(names(tmp_path)) == 1
    sweep(target)
    assert names(tmp_path) == set()
    os.close(told)
    os.close(tell)


def test_a_file_that_its_writer_puts_anew_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with replacing(target) as part:
        part.write_text("first")
        other = tmp_path / "other"  # as safetensors does: a file of its own, moved to where it was asked to write
        other.write_text("second")
        os.replace(other, part)
        swept = os.fork()
        if swept == 0:
            sweep(target)
            os._exit(0)
        os.waitpid(swept, 0)
    assert target.read_text() == "second"
    assert names(tmp_path) == {"file"}


def test_two_processes_that_write_one_file_of_tensors_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "all.safetensors"
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                for _ in range(40):
                    write_tensors(target, {"x": torch.full((50, 50), float(number))}, "test", {"number": number})
                code = 0
            os._exit(code)
        children.append(child)
    codes = []
    while children:
        ended, status = os.waitpid(children[0], os.WNOHANG)
        if ended:
            codes.append(os.waitstatus_to_exitcode(status))
            children.pop(0)
        elif target.is_file():  # a third that reads it meanwhile
            tensors, header = read_tensors(target, "test")
            assert (tensors["x"] == header["number"]).all()
    assert codes == [0, 0]
    tensors, header = read_tensors(target, "test")
    assert (tensors["x"] == header["number"]).all()
    assert names(tmp_path) == {"all.safetensors"}


def test_without_an_exchange_in_one_step_the_old_directory_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmerge.storage.directories._exchanged", lambda *_: False)
    target = tmp_path / "place"
    target.mkdir()
    (target / "old").touch()
    with taking_the_place_of(target) as part:
        (part / "new").touch()
    assert names(target) == {"new"}
    assert names(tmp_path) == {"place"}
    # As a kill between the two renames leaves it.
    aside = tmp_path / f".place.abcdefgh{OLD}"
    aside.mkdir()
    os.rename(target, aside / "old")
    with taking_the_place_of(target) as part:
        assert names(target) == {"new"}
        (part / "newer").touch()
    assert names(target) == {"newer"}
    assert names(tmp_path) == {"place"}
