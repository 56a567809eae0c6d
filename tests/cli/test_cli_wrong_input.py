"""Wrong input: a clear message, a non-zero exit code, and nothing half-written."""

from __future__ import annotations

import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_place import RESNET, SMALL, Command, Place
from safetensors.torch import save_file

from unmerge.bench.digits import network
from unmerge.errors import FileError

FORGET = ("--forget", "label=3")
OUT = ("--out", "wrong")


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


@pytest.fixture(scope="module")
def broken(place: Place) -> Place:
    """Files that are wrong in one way each."""
    folder = place / "broken"
    folder.mkdir()
    (folder / "text.txt").write_text("not a number\n")
    (folder / "no.yaml").write_text("- a list\n")
    (folder / "typo.yaml").write_text("rnk: 4\n")
    (folder / "value.yaml").write_text("rank: many\n")
    (folder / "not.npz").write_text("no arrays")
    (folder / "empty").mkdir()
    np.savez(folder / "nothing.npz", other=np.zeros(3))
    np.savez(folder / "short.npz", images=np.zeros((4, 1, 8, 8), np.float32), labels=np.zeros(3, np.int64))
    np.savez(folder / "wide.npz", inputs=np.zeros((4, 5), np.float32), labels=np.arange(4))
    np.savez(folder / "objects.npz", images=np.array([Evil()], dtype=object))
    (folder / "evil.bin").write_bytes(pickle.dumps({"a": Evil()}))
    torch.save({"state": network()}, folder / "module.pt")
    shutil.copytree(place / "images", folder / "images")
    (folder / "images" / "two" / "bad.png").write_bytes(b"no image")
    (folder / "named" / "cat").mkdir(parents=True)
    shutil.copy(next((place / "images" / "two").iterdir()), folder / "named" / "cat" / "a.png")
    (folder / "headless").mkdir()
    (folder / "headless" / "config.json").write_text('{"model_type": "resnet", "architectures": ["ResNetModel"]}')
    (folder / "hollow").mkdir()
    shutil.copy(place / "resnet" / "config.json", folder / "hollow" / "config.json")
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("precious")
    (folder / "fails.py").write_text("import no_such_library\n")
    own, generator = network().state_dict(), torch.Generator().manual_seed(0)
    starts = {
        "names": {f"module.{name}": value for name, value in own.items()},
        "shapes": {name: value.repeat(2, *[1] * (value.dim() - 1)) for name, value in own.items() if value.dim()},
        "stranger": {name: torch.randn(value.shape, generator=generator) for name, value in own.items() if value.dim()},
    }
    for name, state in starts.items():
        save_file(state, folder / f"{name}.safetensors")
    return place


NPZ = ("--data", "train.npz")
CASES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no model": (("--model", "nowhere", *NPZ, *FORGET), 1, "there is no model 'nowhere'"),
    "a model of a hub": (("--model", "some/resnet-50", *NPZ, *FORGET), 1, "Nothing is downloaded"),
    "a file for a module": (("--model", "my/models.py:build", *NPZ, *FORGET), 1, "by its module: my.models:build."),
    "no config": (("--model", "images", *NPZ, *FORGET), 1, "is not a Hugging Face model: it has no config.json"),
    "no classifier": (("--model", "broken/headless", *NPZ, *FORGET), 1, "ResNetModel, which is no classifier"),
    "no weights": (("--model", "broken/hollow", *NPZ, *FORGET), 1, "broken/hollow cannot be loaded as a model"),
    "weights as model": (("--model", "w.safetensors", *NPZ, *FORGET), 1, "weights alone are no model"),
    "no module": (("--model", "nothing.here:build", *NPZ, *FORGET), 1, "type this where nothing/here.py lies below"),
    "no function": (("--model", "models:biuld", *NPZ, *FORGET), 1, "Did you mean 'build'"),
    "not a module": (("--model", "models:strange", *NPZ, *FORGET), 1, "returned a int; expected an nn.Module"),
    "no weights file": (("--model", "models:build@gone.safetensors", *NPZ, *FORGET), 1, "no file gone.safetensors"),
    "a pickle": (("--model", "models:build@broken/evil.bin", *NPZ, *FORGET), 1, "without running code from it"),
    "a pickled module": (("--model", "models:build@broken/module.pt", *NPZ, *FORGET), 1, "without running code"),
    "other weights": (
        ("--model", "models:build@resnet/model.safetensors", *NPZ, *FORGET),
        1,
        "does not fit",
    ),
    "no init": ((*SMALL, *NPZ, *FORGET, "--init", "gone"), 1, "--init gone is not 'zero'"),
    "the same init": ((*SMALL, *NPZ, *FORGET, "--init", "w.safetensors"), 1, "or --init zero"),
    "no device": ((*SMALL, *NPZ, *FORGET, "--device", "abacus"), 2, "--device abacus (Expected one of cpu, cuda"),
    "a device of others": ((*SMALL, *NPZ, *FORGET, "--device", "vulkan"), 2, "...): expected cpu"),
    "no data": ((*SMALL, *FORGET, "--data", "gone.npz"), 1, "there is no data 'gone.npz'"),
    "data of another kind": ((*SMALL, *FORGET, "--data", "models.py"), 1, "expected an .npz, a .jsonl or a folder"),
    "no npz": ((*SMALL, *FORGET, "--data", "broken/not.npz"), 1, "cannot be read as arrays"),
    "no inputs": ((*SMALL, *FORGET, "--data", "broken/nothing.npz"), 1, "it holds other; expected one of images"),
    "short labels": ((*SMALL, *FORGET, "--data", "broken/short.npz"), 1, "expected 4 integers"),
    "objects": ((*SMALL, *FORGET, "--data", "broken/objects.npz"), 1, "no pickled objects"),
    "no images": ((*SMALL, *FORGET, "--data", "broken/empty"), 1, "holds no images in subfolders"),
    "other classes": (("--model", "resnet", *FORGET, "--data", "broken/named"), 1, "cat are no classes of the model"),
    "unreadable image": (
        ("--model", "resnet", "--data", "broken/images", "--forget", "label=two"),
        1,
        "broken/images/two/bad.png cannot be read as an image",
    ),
    "different sizes": ((*RESNET, "--forget", "label=two", "--pixel-std", "1,2"), 1, "--pixel-std has 2 numbers"),
    "other channels": (
        ("--model", "resnet", *NPZ, *FORGET),
        1,
        "error: the model raised ValueError when it was given inputs of shape (2, 1, 8, 8) (float32): Make sure that",
    ),
    "other features": (
        (*SMALL, "--data", "broken/wide.npz", "--forget", "label=0"),
        1,
        "(1, 5) (float32): Expected 3D (unbatched) or 4D (batched) input to conv2d",
    ),
    "no labels": ((*SMALL, *FORGET, "--data", "plain.npz"), 1, "plain.npz has no labels"),
    "absent label": ((*SMALL, *NPZ, "--forget", "label=12"), 1, "has the label 12; there are 0, 1, 2"),
    "unknown class": ((*RESNET, "--forget", "label=thre"), 1, "Did you mean 'three'"),
    "every class": ((*SMALL, *NPZ, "--forget", "label=0,1,2,3,4,5,6,7,8,9"), 1, "nothing is left to retain"),
    "bad forget": ((*SMALL, *NPZ, "--forget", "lable:3"), 2, "is not of the form label=3"),
    "bare forget": ((*SMALL, *NPZ, "--forget", "3"), 2, "Did you mean --forget label=3?"),
    "a source to forget": ((*SMALL, "--forget", "images"), 2, "type --forget-data images --retain-data SRC."),
    "other entry": ((*SMALL, *NPZ, "--forget", "class=3,5"), 2, "Did you mean --forget label=3,5?"),
    "empty forget": ((*SMALL, *NPZ, "--forget", "label="), 2, "is not of the form label=3"),
    "nothing to forget": ((*SMALL, *NPZ), 2, "say what to forget"),
    "twice": ((*SMALL, *NPZ, *FORGET, "--forget-ids", "ids.txt"), 2, "give one"),
    "forget of nothing": ((*SMALL, *FORGET), 2, "--data SRC, which is missing"),
    "half a pair": ((*SMALL, "--forget-data", "train.npz"), 2, "goes with --retain-data SRC, which is missing"),
    "no ids": ((*SMALL, *NPZ, "--forget-ids", "gone.txt"), 1, "there is no file gone.txt"),
    "bad ids": ((*SMALL, *NPZ, "--forget-ids", "broken/text.txt"), 1, "line 1: 'not a number'"),
    "bad size": ((*SMALL, *NPZ, *FORGET, "--image-size", "big"), 2, "is not of the form 224"),
    "no recipe": ((*SMALL, *NPZ, *FORGET, "--recipe", "gone.yaml"), 1, "there is no file gone.yaml"),
    "list as recipe": ((*SMALL, *NPZ, *FORGET, "--recipe", "broken/no.yaml"), 1, "holds a list"),
    "unknown key": ((*SMALL, *NPZ, *FORGET, "--recipe", "broken/typo.yaml"), 1, "Did you mean 'rank'"),
    "bad value": (
        (*SMALL, *NPZ, *FORGET, "--recipe", "broken/value.yaml"),
        1,
        "broken/value.yaml: rank: 'many' is not",
    ),
    "bad flag": ((*SMALL, *NPZ, *FORGET, "--rank", "many"), 2, "--rank many is not a whole number from 1"),
    "bad word": ((*SMALL, *NPZ, *FORGET, "--basis", "lad"), 2, "Did you mean 'lda'"),
    "bad layer": ((*SMALL, *NPZ, *FORGET, "--layers", "12"), 1, "there is no editable layer '12'"),
    "bad verdict": ((*SMALL, *NPZ, *FORGET, "--on-verdict", "rais"), 2, "Did you mean 'raise'"),
    "bad target": ((*SMALL, *NPZ, *FORGET, "--target", "2"), 2, "is not a share"),
}


@pytest.mark.parametrize("case", CASES)
def test_run_says_what_is_wrong(here: Command, broken: Place, case: str) -> None:
    arguments, code, message = CASES[case]
    before = {entry.name for entry in broken.folder.iterdir()}
    found = here("run", *arguments, *OUT)
    assert found.code == code
    assert message in " ".join(found.err.split())
    assert "executed" not in found.out + found.err
    assert "Traceback" not in found.err
    assert {entry.name for entry in broken.folder.iterdir()} - before <= {"__pycache__"}


@pytest.mark.parametrize(
    "command", [("run", *OUT), ("diagnose",), ("evaluate",), ("apply", "resnet-run", "--recalibrate", "--to", "wrong")]
)
def test_data_that_the_model_cannot_take_are_one_line(
    here: Command, place: Place, resnet_run: object, command: tuple[str, ...]
) -> None:
    found = here(*command, "--model", "resnet", *NPZ, *FORGET)
    assert found.code == 1
    assert found.err.count("\n") == 1
    assert found.err.startswith("error: the model raised ValueError when it was given inputs of shape (")
    assert found.err.endswith("or pass --image-size, or --model package.module:function that takes them as they are.\n")
    assert not (place / "wrong").exists()


@pytest.mark.parametrize("command", [("run", *OUT), ("run", *OUT, "--dry-run"), ("diagnose",)], ids=" ".join)
@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("gone.safetensors", "--init gone.safetensors is not 'zero'"),
        ("broken/names.safetensors", "init lacks 2 of the 2 edited parameters: 6.weight, 11.weight"),
        ("broken/shapes.safetensors", "init has other shapes: 6.weight is"),
        ("w.safetensors", "init has the same weights as the model"),
    ],
)
def test_a_wrong_init_is_told_before_the_model_is_called(
    here: Command, broken: Place, command: tuple[str, ...], init: str, message: str
) -> None:
    model = ("--model", "models:untouched", "--weights", "w.safetensors", "--init", init)
    found = here(command[0], *model, *NPZ, *FORGET, *command[1:])
    assert found.code == 1
    assert message in found.err


def test_another_training_as_init_is_told_before_the_model_is_called_too(here: Command, broken: Place) -> None:
    model = ("--model", "models:untouched", "--weights", "w.safetensors", "--init", "broken/stranger.safetensors")
    found = here("run", *model, *NPZ, *FORGET, *OUT)
    assert found.code == 1
    assert "does not look like the checkpoint" in found.err
    with pytest.raises(NotImplementedError, match="the model was called"):
        here("run", *model, *NPZ, *FORGET, *OUT, "--any-init")


def test_an_error_of_one_s_own_code_passes_through(here: Command, broken: Place) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        here("run", "--model", "broken.fails:build", *NPZ, *FORGET, *OUT)


def test_debug_shows_where(here: Command) -> None:
    with pytest.raises(FileError, match="there is no model 'nowhere'"):
        here("run", "--model", "nowhere", *NPZ, *FORGET, *OUT, "--debug")


def test_json_has_errors_too(here: Command) -> None:
    found = here("run", "--model", "nowhere", *NPZ, *FORGET, *OUT, "--json")
    assert found.json["exit_code"] == 1
    assert "there is no model" in found.json["error"]


def test_a_directory_that_is_not_empty_is_left_alone(here: Command, broken: Place, small_run: object) -> None:
    ours = here("run", *SMALL, *NPZ, *FORGET, "--out", "small-run")
    assert ours.code == 1
    assert "pass --overwrite" in ours.err
    for more in ((), ("--overwrite",)):
        theirs = here("run", *SMALL, *NPZ, *FORGET, "--out", "broken/full", *more)
        assert theirs.code == 1
        assert "was not written by unmerge" in theirs.err
    assert (broken / "broken" / "full" / "mine.txt").read_text() == "precious"
    file = here("run", *SMALL, *NPZ, *FORGET, "--out", "ids.txt")
    assert "expected a directory" in file.err


def test_a_place_that_cannot_be_written_is_told_before_the_work(here: Command, place: Place) -> None:
    # Also root, which may write anywhere else, cannot make a directory there.
    found = here("run", *SMALL, *NPZ, *FORGET, "--out", "/proc/unmerge/out")
    assert found.code == 1
    assert "/proc/unmerge" in found.err
    assert "Traceback" not in found.err


def _little_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize("command", ["run", "apply"])
def test_a_full_disk_leaves_nothing(unmerge: Command, place: Place, small_run: object, command: str) -> None:
    arguments = {
        "run": ("run", *SMALL, *NPZ, *FORGET, "--out", "full-disk"),
        "apply": ("apply", "small-run", *SMALL, "--to", "full-disk"),
    }[command]
    found = unmerge(*arguments, preexec_fn=_little_room)
    assert found.code == 1
    file = {"run": "statistics", "apply": "model"}[command]
    assert f"error: full-disk/{file}.safetensors could not be written" in found.err
    assert "Traceback" not in found.err
    assert not [entry for entry in place.folder.iterdir() if "full-disk" in entry.name]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("apply", "images", *SMALL, "--to", "x"), 1, "holds no edit"),
        (("apply", "small-run", *SMALL, "--to", "small-run"), 1, "--overwrite"),
        (("apply", "small-run", *SMALL, "--to", "x", "--alpha", "-1"), 2, "--alpha"),
        (("apply", "small-run", *SMALL, "--to", "x", "--recalibrate"), 2, "say what to forget"),
        (("revert", "small-run", "--to", "x"), 1, "was not written by unmerge apply"),
        (("apply", "nope", *SMALL, "--to", "x"), 1, "there is no folder nope"),
        (("revert", "nope", "--to", "x"), 1, "there is no folder nope"),
        (("revert", "resnet-new", "--to", "x", "--base", "nope"), 1, "there is no base nope: expected the model that"),
        (("report", "nope"), 1, "there is no folder nope"),
        (("report", "images"), 1, "is no output of unmerge run"),
        (("evaluate", "--model", "resnet", *RESNET[2:], "--forget", "label=3", "--axes", "acuracy"), 2, "'accuracy'"),
        (("evaluate", "--model", "resnet", *RESNET[2:], "--forget", "label=3", "--out", "t.xls"), 2, ".json, .csv"),
        (("evaluate", "--model", "resnet", *RESNET[2:], "--forget", "label=3", "--out", "ids.json"), 1, "--overwrite"),
        (("evaluate", *RESNET, "--forget", "label=3", "--out", "/proc/self/t.json"), 1, "/proc/self is read-only"),
        (("diagnose", *RESNET, "--forget", "label=3", "--out", "/proc/self/d.json"), 1, "/proc/self is read-only"),
        (("demo", "--digit", "12"), 2, "--digit"),
        (("demo", "--out", "images"), 1, "was not written by unmerge"),
    ],
)
def test_other_commands_say_what_is_wrong(
    here: Command,
    place: Place,
    small_run: object,
    resnet_run: object,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    (place / "ids.json").write_text("{}")
    if not (place / "resnet-new").is_dir():
        assert here("apply", "resnet-run", "--model", "resnet", "--to", "resnet-new").code == 0
    found = here(*arguments)
    assert found.code == code
    assert message in found.err
    assert not (place / "x").exists()


def test_a_damaged_record_is_seen(here: Command, place: Place, small_run: object) -> None:
    folder: Path = place / "damaged"
    folder.mkdir()
    (folder / "unmerge.json").write_text('{"base": {"tensors": {"a": "1"}, "checksum": "2"}}')
    found = here("revert", "damaged", "--to", "x")
    assert found.code == 1
    assert "was changed after it was written" in found.err
