"""A disk that is full in the middle of a write: a message, what was there is there, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reliability_place import tree

import unmerge
from full_disk import full_after
from unmerge.cli import main
from unmerge.interop.checkpoints import edit_checkpoint

MODEL = ("--model", "tiny_models:build", "--weights", "w.safetensors", "--data", "digits.npz")
RUN = ("run", *MODEL, "--forget", "label=3", "--curve-samples", "20")


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results; a finished run is in it."""
    place = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main([*RUN, "--out", str(place / "done")]) == 0
    return place


@pytest.mark.parametrize("size", [0, 3000, 8000])
@pytest.mark.parametrize("command", ["run", "again", "report", "collect"])
def test_commands(
    command: str,
    size: int,
    runs: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    before = tree(runs)
    arguments = {
        "run": [*RUN, "--out", str(runs / "new")],
        "again": [*RUN, "--out", str(runs / "done"), "--overwrite", "--forget", "label=5"],
        "report": ["report", str(runs / "done")],
        "collect": ["collect", *MODEL, "--out", str(runs / "all.safetensors")],
    }
    named = {"run": runs / "new", "again": runs / "done", "report": runs / "done", "collect": runs / "all.safetensors"}
    with full_after(size):
        code = main(arguments[command])
    said = capsys.readouterr().err
    assert code == 1
    assert re.fullmatch(rf"error: {re.escape(str(named[command]))}(/\S+)?\b.*File too large.*\n", said)
    assert ".part" not in said
    assert tree(runs) == before
    assert {path.name for path in runs.iterdir()} == {"done"}


def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("unmerge.cli.work.gather", lambda *_: pytest.fail("the data were read"))
    assert main([*RUN, "--out", "/proc/self/run"]) == 1
    assert "/proc/self" in capsys.readouterr().err


def test_edit_checkpoint(runs: Path, folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes((folder / "w.safetensors").read_bytes())
    edit, before = unmerge.Edit.load(runs / "done" / "edit"), tree(tmp_path)
    with full_after(1000), pytest.raises(OSError, match="too large"):
        edit_checkpoint(base, edit, 1.0, tmp_path / "new")
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
