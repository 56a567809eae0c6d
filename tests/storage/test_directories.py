"""A directory appears whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from unmerge.errors import FileError
from unmerge.storage.directories import taking_the_place_of


def test_it_is_there_when_the_block_ends_well(tmp_path: Path):
    target = tmp_path / "deep" / "place"
    with taking_the_place_of(target) as part:
        (part / "inside").mkdir()
        (part / "inside" / "file").write_text("x")
        assert part.parent == target.parent
        assert not target.exists()
    assert (target / "inside" / "file").read_text() == "x"
    assert [path.name for path in target.parent.iterdir()] == ["place"]
    taken = os.umask(0)
    os.umask(taken)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~taken


def test_a_failure_leaves_what_was_there(tmp_path: Path):
    target = tmp_path / "place"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), taking_the_place_of(target) as part:
        (part / "new").rename(part / "other")
    assert [path.name for path in target.iterdir()] == ["old"]
    with pytest.raises(FileNotFoundError), taking_the_place_of(tmp_path / "no" / "place") as part:
        (part / "new").rename(part / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_what_stands_in_the_way_is_told_and_left(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, found in (
        ("file", "file is a file; expected the name of a folder"),
        ("file/a", "file is a file; expected a folder, in which a can be written"),
        ("file/a/b", "file is a file; expected a folder, in which b can be written"),
        ("link", "link is a broken link; expected the name of a folder"),
    ):
        with pytest.raises(FileError, match=found), taking_the_place_of(tmp_path / target):
            raise AssertionError("nothing is written")
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_what_was_there_is_replaced(tmp_path: Path):
    target = tmp_path / "place"
    target.mkdir()
    (target / "old").touch()
    with taking_the_place_of(target) as part:
        (part / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
