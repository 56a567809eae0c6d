"""Nothing is unpickled, and `package.module:function` runs only when the user types it, never from a file."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reader_cases import CASES, INDEX, Case, model, write_all

import unmerge
from unmerge.cli import exports, main
from unmerge.cli.recipes import RecipeFlags, recipe_of
from unmerge.errors import UnmergeError, UnmergeWarning
from unmerge.model.initial import initial_weights
from unmerge.storage.files import write_tensors

POISON = "poisoned_module"
REFERENCE = f"{POISON}:run"


class Bomb:
    """What a pickle may do when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('exploded', 'w').close()",)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Good files for every reader, in a folder with a module that must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{POISON}.py").write_text("raise SystemExit('imported')")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmergeWarning)
        write_all(tmp_path)
    yield tmp_path
    assert POISON not in sys.modules
    assert not (tmp_path / "exploded").exists()


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    load = torch.load

    def checked(*arguments: Any, **options: Any) -> Any:
        assert options.get("weights_only") is True
        return load(*arguments, **options)

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    monkeypatch.setattr(torch, "load", checked)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
def test_no_reader_unpickles(case: Case, place: Path, no_pickle: None) -> None:
    case.read(place)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
def test_a_pickle_in_the_place_of_a_file_is_refused(case: Case, place: Path) -> None:
    (place / case.file).write_bytes(pickle.dumps({"state_dict": Bomb()}))
    if case.name == "readable-edit":
        case.read(place)  # for people only: the tensors' file holds all of it
        return
    with pytest.raises(UnmergeError):
        case.read(place)


def test_a_pickled_checkpoint_is_refused(place: Path) -> None:
    for name in ("model.bin", "model.pt"):
        torch.save({"0.weight": Bomb()}, place / name)
        with pytest.raises(UnmergeError, match="without running code from it"):
            initial_weights(model(), place / name, ["0.weight"])
    index = json.loads((place / INDEX).read_text())
    index["weight_map"]["0.weight"] = "model.bin"
    (place / "checkpoint" / "model.bin").write_bytes((place / "model.bin").read_bytes())
    (place / INDEX).write_text(json.dumps(index))
    with pytest.raises(UnmergeError, match="without running code from it"):
        initial_weights(model(), place / "checkpoint", ["0.weight"])


def test_a_recipe_imports_nothing(place: Path) -> None:
    for field in ("layers", "basis", "init", "model", "forward"):
        (place / "recipe.yaml").write_text(f"{field}: {REFERENCE}\n")
        try:
            recipe = recipe_of(RecipeFlags(), place / "recipe.yaml")
        except UnmergeError:
            continue
        assert recipe.layers == REFERENCE  # a name, as any other
        with pytest.raises(UnmergeError):
            unmerge.collect(model(), [torch.ones(2, 5)], recipe.layers)


def test_an_edit_imports_nothing(place: Path) -> None:
    edit = unmerge.Edit.load(place / "edit")
    header = edit.to_dict()
    header["recipe"]["layers"] = [REFERENCE]
    header["provenance"] |= {"init": REFERENCE, "choices": {"layers": REFERENCE}}
    tensors = {f"{name}:{part}": getattr(layer, part) for name, layer in edit.layers.items() for part in ("B", "Q")}
    tensors |= {f"{name}:shift": layer.shift for name, layer in edit.layers.items() if layer.shift is not None}
    write_tensors(place / "edit" / "edit.safetensors", tensors, "edit", header)
    unmerge.Edit.load(place / "edit").apply(model())


@pytest.mark.parametrize("is_hugging_face", [False, True])
def test_the_record_of_an_applied_model_imports_nothing(
    place: Path, is_hugging_face: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((place / "applied" / exports.APPLIED).read_text())
    (place / REFERENCE).touch()  # so that even a file of that name is there
    record["base"] |= {"reference": REFERENCE, "directory": REFERENCE, "weights": REFERENCE}
    (place / "applied" / exports.APPLIED).write_text(json.dumps(record))
    if is_hugging_face:
        (place / "applied" / "config.json").write_text("{}")
    assert main(["revert", "applied", "--to", "restored"]) == 1
    assert "error:" in capsys.readouterr().err
    assert not (place / "restored").exists()


def test_a_model_directory_runs_no_code_of_its_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = place / "remote"
    directory.mkdir()
    (directory / f"{POISON}.py").write_text("open('exploded', 'w').close()\nclass Config: pass\n")
    config = {"model_type": "strange", "architectures": ["XForImageClassification"]}
    config["auto_map"] = {"AutoConfig": f"{POISON}.Config", "AutoModel": f"{POISON}.Config"}
    (directory / "config.json").write_text(json.dumps(config))
    arguments = ["--model", str(directory), "--data", "none.npz", "--out", "all.safetensors"]
    assert main(["collect", *arguments]) == 1
    assert "cannot be loaded as a model" in capsys.readouterr().err


def test_a_reference_that_is_typed_does_run(place: Path) -> None:
    (place / "typed_module.py").write_text("raise SystemExit(77)")
    arguments = ["--model", "typed_module:build", "--data", "none.npz", "--out", "all.safetensors"]
    assert main(["collect", *arguments]) == 77
