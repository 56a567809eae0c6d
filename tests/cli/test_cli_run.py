"""`unmerge run` and `diagnose`: what is written, what is said, and how a second run goes on."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cli_place import RESNET, SMALL, Command, Place, Result

import unmerge as library

TRAIN = ("--data", "train.npz")
FILES = {
    "curve.json",
    "diagnosis.json",
    "edit",
    "log.txt",
    "norms.safetensors",
    "recipe.yaml",
    "report.html",
    "run.json",
    "statistics.safetensors",
}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_run_on_arrays_writes_one_directory(small_run: tuple[Path, Result]) -> None:
    out, result = small_run
    assert {entry.name for entry in out.iterdir()} == FILES
    assert result.err == ""
    said = result.json
    assert said["verdict"] == "separable"
    assert said["accuracy"]["before"]["forget"] > 0.95
    assert said["accuracy"]["after"]["forget"] == 0
    assert said["accuracy"]["after"]["retain"] > 0.95
    record = read(out / "run.json")
    assert record["command"].startswith("unmerge run --model models:build --weights w.safetensors --data train.npz")
    assert record["request"] == "class 3 of train.npz"
    assert {"unmerge", "torch", "python"} <= set(record["versions"])
    assert {"statistics", "diagnosis", "edit", "curve"} <= set(record["seconds"])
    sample = record["samples"][0]
    assert base64.b64decode(sample["png"]).startswith(b"\x89PNG")
    assert (sample["label"], sample["before"]) == ("3", "3")
    assert sample["after"] != "3"
    assert 0 < sample["after_confidence"] <= 1
    curve = json.loads((out / "curve.json").read_text())
    assert [set(point) for point in curve] == [{"alpha", "forget", "retain"}] * len(curve)
    assert curve[0]["alpha"] == 0
    assert curve[0]["forget"] > 0.95
    assert read(out / "diagnosis.json")["verdict"]["kind"] == "separable"
    assert library.Recipe(**yaml.safe_load((out / "recipe.yaml").read_text())).basis == "blend"
    statistics = library.Statistics.load(out / "statistics.safetensors")
    assert statistics.samples == 1347
    assert "class 3 of train.npz: separable" in (out / "log.txt").read_text()
    assert "<html" in (out / "report.html").read_text()


def test_run_on_an_image_folder_takes_the_model_s_own_names(resnet_run: tuple[Path, Result]) -> None:
    out, result = resnet_run
    assert "classes three, five of images: separable" in result.out
    edit = library.Edit.load(out / "edit")
    assert edit.removed == (3, 5)
    samples = read(out / "run.json")["samples"]
    assert len(samples) == 12
    assert {sample["label"] for sample in samples} == {"three", "five"}
    assert not {sample["after"] for sample in samples} & {"three", "five"}


def test_the_same_inputs_resume_from_the_statistics(here: Command, place: Place) -> None:
    def again(*arguments: str, model: tuple[str, ...] = SMALL) -> bool:
        found = here("run", *model, *arguments, "--out", "again", "--overwrite", "--no-report", "--json")
        assert found.code in (0, 4)
        return bool(found.json["resumed"])

    def changes() -> dict[str, torch.Tensor]:
        edit = library.Edit.load(place / "again" / "edit")
        return {name: layer.B @ layer.Q.mT for name, layer in edit.layers.items()}

    assert not again(*TRAIN, "--forget", "label=3")
    first = changes()
    assert again(*TRAIN, "--forget", "label=3")
    for name, change in changes().items():
        assert (change - first[name]).norm() <= 1e-4 * first[name].norm()  # what float32 loses in R = S − F
    assert again(*TRAIN, "--forget", "label=8")  # they are of everything, so another request is served too
    with np.load(place / "train.npz") as data:
        np.savez(place / "fewer.npz", images=data["images"][:300], labels=data["labels"][:300])
    assert not again("--data", "fewer.npz", "--forget", "label=8")
    assert not again("--data", "fewer.npz", "--forget", "label=8", model=("--model", "models:build"))
    assert not again("--data", "fewer.npz", "--forget", "label=8", "--edited-only", model=("--model", "models:build"))


def test_statistics_of_another_run_serve_the_next_request(here: Command, small_run: tuple[Path, Result]) -> None:
    known = small_run[0] / "statistics.safetensors"
    found = here(
        "run", *SMALL, *TRAIN, "--forget", "label=8", "--statistics", known, "--out", "next", "--no-report", "--json"
    )
    assert found.code == 0
    assert found.json["accuracy"]["after"]["forget"] == 0
    strange = here("run", *RESNET, "--forget", "label=three", "--statistics", known, "--out", "next2")
    assert strange.code == 1
    assert "collected with other weights" in strange.err


def test_ctrl_c_leaves_nothing_half_written(
    unmerge: Command, here: Command, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> set[str]:
        return {entry.name for entry in place.folder.iterdir() if "stopped" in entry.name}

    model = ("--model", "models:interrupted", "--weights", "w.safetensors")
    command = ("run", *model, *TRAIN, "--forget", "label=3", "--out", "stopped")
    monkeypatch.setenv("CTRL_C_AT", "4")  # in the pass
    assert here(*command).code == 130
    assert left() == set()
    after = unmerge(*command, more={"CTRL_C_AT": "40"})  # after it: what was read is kept
    assert after.code == 130
    assert "interrupted" in after.err
    assert "Traceback" not in after.err
    assert left() == {".stopped.resume"}
    again = here("run", *SMALL, *TRAIN, "--forget", "label=3", "--out", "stopped", "--no-report")
    assert again.code == 0
    assert "resuming from" in again.out
    assert left() == {"stopped"}


def test_flags_stand_over_the_file_and_the_file_over_the_defaults(here: Command, place: Place) -> None:
    (place / "recipe.yaml").write_text("basis: lda\nlam: 3\nhead: edit\nalpha: 0.5\n")
    common = ("run", *SMALL, *TRAIN, "--forget", "label=3", "--recipe", "recipe.yaml", "--out", "flags", "--no-report")
    assert here(*common, "--lam", "7", "--layers", "6, 11", "--skip-layers", "1").code == 0
    recipe = yaml.safe_load((place / "flags" / "recipe.yaml").read_text())
    assert {name: recipe[name] for name in ("basis", "lam", "head", "alpha", "layers", "skip_layers", "rank")} == {
        "basis": "lda",
        "lam": 7.0,
        "head": "edit",
        "alpha": 0.5,
        "layers": ["6", "11"],
        "skip_layers": 1,
        "rank": 16,
    }
    # A resolved recipe is a recipe.
    written = place / "flags" / "recipe.yaml"
    assert here("diagnose", *SMALL, *TRAIN, "--forget", "label=3", "--recipe", written).code == 0


def test_the_recipe_says_what_was_left_open_for(small_run: tuple[Path, Result]) -> None:
    text = (small_run[0] / "recipe.yaml").read_text()
    assert "# here: 6, 11\nlayers: null" in text
    assert "# here: rows [3] removed: no retained sample has these classes\nhead: auto" in text
    assert re.search("# here: 1: .*\nalpha: null", text)
    assert re.search("# here: .*\nskip_layers: auto", text)
    assert text.count("# here: ") == 5


def test_every_field_of_the_recipe_is_a_flag(here: Command) -> None:
    text = here("run", "--help").out
    for entry in fields(library.Recipe):
        assert f"--{entry.name.replace('_', '-')} " in text


def test_random_samples_are_refused_or_not_forgotten(here: Command, place: Place) -> None:
    command = ("run", *SMALL, *TRAIN, "--forget-ids", "ids.txt", "--out", "random", "--no-report", "--json")
    refused = here(*command, "--on-verdict", "raise")
    assert refused.code == 3
    assert "instance-like" in refused.err
    assert not (place / "random").exists()
    diagnosed = here("diagnose", *SMALL, *TRAIN, "--forget-ids", "ids.txt", "--on-verdict", "raise", "--json")
    assert diagnosed.code == 3
    assert diagnosed.json["exit_code"] == 3
    warned = here(*command)
    assert warned.code == 4
    assert "instance-like" in warned.err
    assert "no alpha brings the forget measure" in warned.err
    assert warned.json["reached"] is False
    assert read(place / "random" / "alpha.json")["reached"] is False


def test_a_loader_of_one_s_own(here: Command) -> None:
    options = ("--head", "edit", "--out", "loader", "--no-report", "--json")
    found = here("run", *SMALL, "--data", "models:loader", "--forget", "label=3", *options)
    assert found.code == 0
    assert found.json["alpha"] == 1  # no row is removed, and the classifier's own edit forgets
    assert found.json["accuracy"]["after"]["forget"] <= 0.01


def test_a_model_that_knows_nothing_is_told(here: Command) -> None:
    request = ("--data", "train.npz", "--forget", "label=3", "--no-report")
    found = here("run", "--model", "models:ignorant", *request, "--out", "ignorant")
    assert found.code == 0
    assert "there is nothing to forget. Are these the trained weights (--weights FILE)" in found.err
    assert "nothing to forget" not in here("run", *SMALL, *request, "--out", "knowing").err


def test_an_edit_of_no_strength_is_not_said_to_lack_a_batch_norm(here: Command) -> None:
    found = here("run", *RESNET, "--forget", "label=two", "--alpha", "0", "--out", "still", "--no-report")
    assert found.code == 0
    assert "BatchNorm" not in found.err


def test_separate_sources_and_data_without_labels(here: Command, place: Place) -> None:
    with np.load(place / "train.npz") as data:
        chosen = data["labels"] == 3
        np.savez(place / "forget.npz", inputs=data["images"][chosen])
        np.savez(place / "retain.npz", inputs=data["images"][~chosen])
    found = here(
        "run",
        *SMALL,
        "--forget-data",
        "forget.npz",
        "--retain-data",
        "retain.npz",
        "--out",
        "unlabelled",
        "--no-report",
        "--json",
    )
    assert found.code == 0
    assert found.json["alpha"] is None
    assert "no labels" in found.err
    assert not (place / "unlabelled" / "curve.json").exists()


def test_dry_run_says_what_would_happen(here: Command, place: Place) -> None:
    found = here("run", *RESNET, "--forget", "label=three", "--out", "dry", "--dry-run")
    assert found.code == 0
    assert "classifier.1" in found.out
    assert "MiB of statistics" in found.out
    assert re.search(
        r"time: about \d+\.\d s for the pass over 1 \+ 9 batches, about \d+\.\d s for the diagnosis", found.out
    )
    assert not (place / "dry").exists()


def test_diagnose_prints_the_verdict_and_writes_json(unmerge: Command, place: Place) -> None:
    found = unmerge("diagnose", *SMALL, *TRAIN, "--forget", "label=3", "--out", "diagnosis.json")
    assert found.code == 0
    assert found.out.startswith("class 3 of train.npz\nseparable (S = ")
    assert set(read(place / "diagnosis.json")) == {"layers", "verdict", "alpha", "basis", "samples"}
