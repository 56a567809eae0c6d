"""`unmerge apply`, `revert` and `evaluate`: models on disk with the edit, without it again, and side by side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from cli_place import RESNET, SMALL, Command, Place, Result
from safetensors.torch import load_file
from transformers import ResNetForImageClassification

import unmerge as library
from unmerge.bench.digits import load_digits, network
from unmerge.editing.rewriting import REMOVED_BIAS


def same(first: Path, second: Path) -> bool:
    one, other = load_file(first), load_file(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_hugging_face_model_is_applied_and_reverted(
    unmerge: Command, here: Command, place: Place, resnet_run: tuple[Path, Result]
) -> None:
    before = (place / "resnet" / "model.safetensors").read_bytes()
    applied = unmerge("apply", "resnet-run", "--model", "resnet", "--to", "resnet-new")
    assert applied.code == 0, applied.err
    assert (place / "resnet" / "model.safetensors").read_bytes() == before
    names = {entry.name for entry in (place / "resnet-new").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "unmerge.json"}
    assert "without classes three, five" in (place / "resnet-new" / "README.md").read_text()
    record = json.loads((place / "resnet-new" / "unmerge.json").read_text())
    assert record["base"]["directory"] == str((place / "resnet").resolve())
    (place / "usual").touch()
    usual = (place / "usual").stat().st_mode
    assert {entry.stat().st_mode for entry in (place / "resnet-new").iterdir()} == {usual}

    model = ResNetForImageClassification.from_pretrained(place / "resnet")
    edit = library.Edit.load(place / "resnet-run" / "edit")
    edit.apply(model)
    found = ResNetForImageClassification.from_pretrained(place / "resnet-new")
    fitted = load_file(place / "resnet-run" / "norms.safetensors")
    assert f"{edit.head}.weight" in fitted
    for layer in edit.layers:
        expected = fitted.get(f"{layer}.weight", model.get_submodule(layer).weight)
        assert torch.equal(found.get_submodule(layer).weight, expected)

    reverted = here("revert", "resnet-new", "--to", "resnet-back", "--json")
    assert reverted.code == 0, reverted.err
    assert reverted.json["identical"] is True
    assert same(place / "resnet" / "model.safetensors", place / "resnet-back" / "model.safetensors")


def test_a_model_of_one_s_own_is_applied_and_reverted(
    unmerge: Command, here: Command, place: Place, small_run: object
) -> None:
    applied = here("apply", "small-run", *SMALL, "--to", "small-new", "--json")
    assert applied.code == 0
    assert applied.json["recalibrated"] is True  # with what the run estimated
    model = network()
    model.load_state_dict(load_file(place / "small-new" / "model.safetensors"))
    images, _ = load_digits()
    forget, retain = images.only(3), images.without(3)
    shares = json.loads((place / "small-run" / "run.json").read_text())["accuracy"]["after"]
    with torch.no_grad():
        assert (model.eval()(forget.images).argmax(1) == 3).float().mean() == shares["forget"]
        assert abs((model(retain.images).argmax(1) == retain.labels).float().mean() - shares["retain"]) < 0.01
    assert unmerge("revert", "small-new", "--to", "small-back").code == 0
    assert same(place / "w.safetensors", place / "small-back" / "model.safetensors")

    # The base was moved, and then it is another one.
    shutil.move(place / "w.safetensors", place / "moved.safetensors")
    try:
        lost = here("revert", "small-new", "--to", "small-lost")
        assert (lost.code, lost.err.partition(".")[2].strip().endswith("Pass --base PATH.")) == (1, True)
        assert here("revert", "small-new", "--to", "small-moved", "--base", "moved.safetensors").code == 0
    finally:
        shutil.move(place / "moved.safetensors", place / "w.safetensors")
    wrong = here("revert", "small-new", "--to", "small-wrong", "--base", "small-new")
    assert wrong.code == 1
    assert "is not the model that was edited" in wrong.err
    assert not (place / "small-wrong").exists()


def test_a_model_that_lies_in_no_file_is_reverted_from_what_was_kept(
    here: Command, place: Place, small_run: object
) -> None:
    assert here("apply", "small-run", "--model", "models:trained", "--to", "code-new", "--alpha", "0.5").code == 0
    assert (place / "code-new" / "before.safetensors").is_file()
    assert here("revert", "code-new", "--to", "code-back").code == 0
    assert same(place / "w.safetensors", place / "code-back" / "model.safetensors")


def test_another_strength_needs_the_data_for_batch_norm(here: Command, small_run: object) -> None:
    command = ("apply", "small-run", *SMALL, "--alpha", "2", "--to", "strong", "--overwrite", "--json")
    plain = here(*command)
    assert "re-estimated BatchNorm and the classifier at alpha=1" in plain.err
    assert plain.json["recalibrated"] is False
    again = here(*command, "--recalibrate", "--data", "train.npz", "--forget", "label=3")
    assert again.err == ""
    assert again.json["recalibrated"] is True


def test_a_refitted_classifier_is_kept_with_the_run(here: Command, place: Place) -> None:
    # One batch of all samples, which does not depend on their order.
    data = ("--data", "train.npz", "--forget", "label=3", "--batch-size", 2000)
    run = here("run", *SMALL, *data, "--refit", "0.1", "--curve-samples", 2000, "--out", "refit-run", "--no-report")
    assert run.code == 0, run.err
    kept = load_file(place / "refit-run" / "norms.safetensors")
    assert {"7.running_mean", "11.weight", "11.bias"} <= kept.keys()
    assert here("apply", "refit-run", *SMALL, "--to", "refit-new").code == 0
    assert here("apply", "refit-run", *SMALL, "--to", "refit-again", "--recalibrate", *data).code == 0
    found, again = (load_file(place / name / "model.safetensors") for name in ("refit-new", "refit-again"))
    torch.testing.assert_close(found, again, rtol=0, atol=1e-4)
    assert all(found[name].equal(value) for name, value in kept.items())

    model = network()
    model.load_state_dict(load_file(place / "w.safetensors"))
    library.Edit.load(place / "refit-run" / "edit").apply(model)
    moved = (found["11.weight"] - model[11].weight).abs().amax(1) > 1e-2
    assert moved.tolist() == [label != 3 for label in range(10)]
    images, _ = load_digits()
    gone, kept_ones = ([(part.images, part.labels)] for part in (images.only(3), images.without(3)))
    classifiers = []
    for forget in (gone, None):  # what is forgotten counts in the fit as well
        model = network()
        model.load_state_dict(load_file(place / "w.safetensors"))
        library.Edit.load(place / "refit-run" / "edit").apply(model, recalibrate=kept_ones, forget=forget)
        classifiers.append(model[11].weight.detach())
    torch.testing.assert_close(found["11.weight"], classifiers[0], rtol=0, atol=1e-4)
    assert (classifiers[0] - classifiers[1]).abs().max() > 1e-2
    assert here("revert", "refit-new", "--to", "refit-back").code == 0
    assert same(place / "w.safetensors", place / "refit-back" / "model.safetensors")


def test_the_classifier_of_a_run_does_not_bring_back_what_an_earlier_edit_took(here: Command, place: Place) -> None:
    for label in (3, 8):
        data = ("--data", "train.npz", "--forget", f"label={label}", "--out", f"without-{label}", "--no-report")
        assert here("run", *SMALL, *data).code == 0
    assert here("apply", "without-3", *SMALL, "--to", "first").code == 0
    base = ("--model", "models:build", "--weights", "first/model.safetensors")
    both = here("apply", "without-8", *base, "--to", "both", "--force")
    assert both.code == 0, both.err
    assert "the model is not the one that the run was on" in both.err
    found = load_file(place / "both" / "model.safetensors")
    assert (found["11.bias"] == REMOVED_BIAS).nonzero().flatten().tolist() == [3, 8]
    assert not found["11.weight"][[3, 8]].any()


def test_an_edit_is_not_applied_to_other_weights(here: Command, place: Place, small_run: object) -> None:
    other = here("apply", "small-run", "--model", "models:build", "--to", "other")
    assert other.code == 1
    assert "fitted on other weights" in other.err
    assert not (place / "other").exists()
    itself = here("apply", "resnet-run", "--model", "resnet", "--to", "resnet", "--overwrite")
    assert itself.code == 1
    assert "was not written by unmerge" in itself.err


def test_evaluate_prints_and_writes_tables(unmerge: Command, place: Place, resnet_run: object) -> None:
    options = ("--forget", "label=three,five", "--axes", "accuracy", "--out", "table.md", "--out", "table.tex")
    models = ("--model", "base=resnet", "--edit", "edited=resnet-run", "--reference", "resnet", "--test", "images")
    found = unmerge("evaluate", *models, *RESNET[2:], *options, "--out", "table.csv", "--out", "table.json")
    assert found.code == 0, found.err
    assert found.out.startswith("summary\n")
    assert "ToW" in found.out
    assert "samples of split 'forget' are in split 'test' too" in found.err
    assert "| edited |" in (place / "table.md").read_text()
    assert r"\toprule" in (place / "table.tex").read_text()
    assert (place / "table.csv").read_text().startswith("table,model,figure")
    rows = json.loads((place / "table.json").read_text())["tables"]["accuracy"]["rows"]
    assert rows["edited"]["forget"]["value"] == 0
    assert rows["base"]["forget"]["value"] > 0.9


def test_evaluate_prints_the_summary_or_every_table(here: Command, resnet_run: object) -> None:
    command = ("evaluate", "--model", "resnet", *RESNET[2:], "--forget", "label=three", "--axes")
    short, full = here(*command, "accuracy,calibration"), here(*command, "accuracy,calibration", "--tables")
    assert "\ncalibration\n" not in short.out
    assert "--tables prints all 2 tables" in short.out
    assert "\ncalibration\n" in full.out
    assert "summary" not in full.out
    assert here(*command, "calibration").out.startswith("calibration\n")


def test_an_edit_that_is_not_there_is_named(here: Command) -> None:
    found = here("evaluate", "--model", "resnet", "--edit", "nope", *RESNET[2:], "--forget", "label=three")
    assert (found.code, "there is no folder nope" in found.err) == (1, True)
