"""`unmerge collect` and `merge-stats`: shards are one pass; what does not belong together is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_place import RESNET, SMALL, Command, Place, Result

import unmerge as library
from full_disk import full_after
from unmerge.collecting.merging import Shard, merge, save_shard
from unmerge.errors import FileError, StatisticsError
from unmerge.storage.files import read_header

DATA = ("--data", "few.npz")
TOTAL = 3


@pytest.fixture(scope="session")
def few(place: Place) -> None:
    """100 digits, which three shards share unequally."""
    with np.load(place / "train.npz") as data:
        np.savez(place / "few.npz", images=data["images"][:100], labels=data["labels"][:100])


@pytest.fixture
def shards(few: None, here: Command, place: Place) -> list[Path]:
    paths = [place / f"part{number}.safetensors" for number in range(1, TOTAL + 1)]
    for number, path in enumerate(paths, 1):
        if not path.exists():
            found = here("collect", *SMALL, *DATA, "--shard", f"{number}/{TOTAL}", "--out", path, "--json")
            assert found.code == 0, found.err
            assert found.json["shard"] == f"{number}/{TOTAL}"
    return paths


@pytest.fixture
def whole(few: None, here: Command, place: Place) -> library.Statistics:
    found = here("collect", *SMALL, *DATA, "--out", "whole.safetensors", "--overwrite")
    assert found.code == 0, found.err
    return library.Statistics.load(place / "whole.safetensors")


def test_merged_shards_are_one_pass(here: Command, place: Place, shards: list[Path], whole: library.Statistics) -> None:
    backwards = list(reversed(shards))
    found = here("merge-stats", *backwards, "--out", "merged.safetensors", "--overwrite", "--json")
    assert found.code == 0, found.err
    assert found.json["samples"] == 100
    assert [library.Statistics.load(path).samples for path in shards] == [34, 33, 33]
    merged = library.Statistics.load(place / "merged.safetensors")
    with np.load(place / "few.npz") as data:
        classes, counts = np.unique(data["labels"], return_counts=True)
    assert merged.classes == tuple(classes.tolist())
    assert merged.class_samples == tuple(counts.tolist())
    for name, layer in whole.layers.items():
        assert merged[name].moments.n == layer.moments.n
        assert torch.equal(merged[name].class_rows, layer.class_rows)
        for part in ("mean", "scatter"):
            mine, theirs = (getattr(each.moments, part).double() for each in (merged[name], layer))
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        assert (merged[name].class_sums - layer.class_sums).norm() <= 1e-5 * layer.class_sums.norm()


def test_the_file_says_which_share_of_which_data_it_is(place: Place, shards: list[Path]) -> None:
    said = [read_header(path, "statistics")["shard"] for path in shards]
    assert [(entry["number"], entry["total"]) for entry in said] == [(1, 3), (2, 3), (3, 3)]
    assert len({entry["data"] for entry in said}) == 1
    assert len(said[0]["data"]) == 64


def test_a_run_starts_from_merged_statistics(here: Command, place: Place, shards: list[Path]) -> None:
    assert here("merge-stats", *shards, "--out", "start.safetensors", "--overwrite").code == 0
    found = here(
        *("run", *SMALL, *DATA, "--forget", "label=3", "--statistics", "start.safetensors", "--out", "started"),
        *("--no-report", "--json"),
    )
    assert found.code == 0, found.err
    assert found.json["accuracy"]["after"]["forget"] == 0


@pytest.mark.parametrize("command", [("run", "--no-report", "--out", "partly"), ("diagnose",)])
def test_a_request_refuses_one_shard_and_other_data(
    here: Command, place: Place, shards: list[Path], command: tuple[str, ...]
) -> None:
    """Numbers of samples mean others in other data, and one shard holds not all that is subtracted from it."""
    (place / "some.txt").write_text("\n".join(map(str, range(0, 60, 3))))
    asked = (*command, *SMALL, "--forget-ids", "some.txt", "--statistics")
    one = here(*asked, shards[0], *DATA)
    assert one.code == 1
    assert f"{shards[0]} is shard 1 of 3; merge them: unmerge merge-stats" in one.err
    assert here("merge-stats", *shards, "--out", "all.safetensors", "--overwrite").code == 0
    other = here(*asked, "all.safetensors", "--data", "train.npz")
    assert other.code == 1
    assert "all.safetensors was collected from other data than --data" in other.err
    assert not (place / "partly").exists()


def test_statistics_of_a_run_say_which_data_they_are_of(
    here: Command, place: Place, few: None, small_run: tuple[Path, Result]
) -> None:
    known = small_run[0] / "statistics.safetensors"
    request = ("diagnose", *SMALL, "--forget", "label=8")
    assert "was collected from other data" in here(*request, *DATA, "--statistics", known).err
    library.Statistics.load(known).save(place / "old.safetensors")  # as files were written before they said it
    assert here(*request, "--data", "train.npz", "--statistics", "old.safetensors").code == 0


def test_a_folder_that_was_written_anew_is_warned_of(
    here: Command, place: Place, resnet_run: tuple[Path, Result]
) -> None:
    request = ("diagnose", *RESNET, "--forget", "label=two", "--statistics", resnet_run[0] / "statistics.safetensors")
    assert here(*request).err == ""
    touched = next((place / "images").rglob("*.png"))
    before = touched.stat()
    os.utime(touched, (1, 1))
    found = here(*request)
    os.utime(touched, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found.code == 0
    assert "collected from other data" in found.err
    assert "written anew" in found.err


def test_missing_and_duplicated_shards_are_refused_by_name(
    here: Command, place: Place, shards: list[Path], tmp_path: Path
) -> None:
    missing = here("merge-stats", shards[0], shards[2], "--out", tmp_path / "all")
    assert missing.code == 1
    assert "1 of 3 shards are missing: 2/3" in missing.err
    assert "--shard 2/3" in missing.err
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(shards[1].read_bytes())
    twice = here("merge-stats", *shards, copy, "--out", tmp_path / "all")
    assert twice.code == 1
    assert f"{shards[1]}, {copy} are all shard 2/3" in twice.err
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--data", "plain.npz"), "of other data"),
        ((*DATA, "--batch-size", "7", "--shard", "2/4"), "one of another number of shards than"),
        ((*DATA, "--model", "models:build", "--weights", "none"), "collected with other weights"),
        ((*DATA, "--layers", "0, 11"), "collected from other layers"),
        ((*DATA, "--per-class", "full"), "collected with another --per-class"),
    ],
)
def test_foreign_shards_are_refused_by_name(
    here: Command, shards: list[Path], tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    strange = tmp_path / "strange.safetensors"
    given = [*SMALL, "--shard", "2/3", *arguments, "--out", strange]
    if "none" in arguments:
        given = ["--model", "models:build", *DATA, "--shard", "2/3", "--out", strange]
    assert here("collect", *given).code == 0
    found = here("merge-stats", shards[0], strange, shards[2], "--out", tmp_path / "all")
    assert found.code == 1
    assert f"{strange} (2/" in found.err
    assert reason in found.err
    assert not (tmp_path / "all").exists()


def test_statistics_without_a_shard_are_no_shard(whole: library.Statistics, tmp_path: Path) -> None:
    whole.save(tmp_path / "plain.safetensors")
    with pytest.raises(FileError, match="is no shard: it does not say which share"):
        merge([tmp_path / "plain.safetensors"])
    save_shard(whole, Shard(4, 3, "x"), tmp_path / "wrong.safetensors")
    with pytest.raises(FileError, match="is no shard"):
        merge([tmp_path / "wrong.safetensors"])
    with pytest.raises(StatisticsError, match="no file to merge"):
        merge([])


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3"])
def test_a_shard_that_is_none_is_wrong_usage(here: Command, few: None, shard: str, tmp_path: Path) -> None:
    found = here("collect", *SMALL, *DATA, "--shard", shard, "--out", tmp_path / "x")
    assert found.code == 2
    assert "is not of the form 3/16" in found.err


def test_what_cannot_be_cut_says_so(here: Command, few: None, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "x")
    many = here("collect", *SMALL, *DATA, "--shard", "1/101", *out)
    assert many.code == 1
    assert "100 samples cannot be cut into 101 shards" in many.err
    loader = here("collect", *SMALL, "--data", "models:loader", "--shard", "1/2", *out)
    assert loader.code == 1
    assert "numbered samples" in loader.err
    assert here("collect", *SMALL, *out).code == 2
    assert here("collect", *SMALL, *DATA, "--per-class", "mean", *out).code == 2
    assert not list(tmp_path.iterdir())


def test_a_loader_of_one_s_own_is_read_whole(here: Command, tmp_path: Path) -> None:
    assert here("collect", *SMALL, "--data", "models:loader", "--out", tmp_path / "all.safetensors").code == 0
    assert library.Statistics.load(tmp_path / "all.safetensors").samples == 1347


def test_a_full_disk_keeps_the_file_that_was_there(here: Command, shards: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "all.safetensors"
    target.write_bytes(b"before")
    for command in (("collect", *SMALL, *DATA), ("merge-stats", *shards)):
        with full_after(2000):
            found = here(*command, "--out", target, "--overwrite")
        assert found.code == 1
        assert "all.safetensors" in found.err
        assert target.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_target_is_told_before_the_work(here: Command, few: None, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    found = here("collect", *SMALL, *DATA, "--out", tmp_path / "all.safetensors")
    assert found.code == 1
    assert "is read-only" in found.err


def test_a_file_that_is_there_is_not_replaced_unasked(here: Command, few: None, shards: list[Path]) -> None:
    before = shards[0].read_bytes()
    found = here("collect", *SMALL, *DATA, "--shard", "2/3", "--out", shards[0])
    assert found.code == 1
    assert "--overwrite" in found.err
    assert shards[0].read_bytes() == before
