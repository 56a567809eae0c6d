"""A checkpoint directory is read as its index says, and an index that is not true of its files is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from unmerge.errors import FileError
from unmerge.interop.shards import Checkpoint, overwriting

INDEX = "model.safetensors.index.json"
PARTS = {
    "model-00001-of-00002.safetensors": {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)},
    "model-00002-of-00002.safetensors": {"b.c.weight": torch.ones(4, dtype=torch.bfloat16)},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for file, tensors in PARTS.items():
        save_file(tensors, tmp_path / file)
    write_index(tmp_path, {name: file for file, tensors in PARTS.items() for name in tensors})
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def test_tensors_are_read_from_where_the_index_says(directory: Path):
    checkpoint = Checkpoint.of(directory)
    expected = {name: tensor for tensors in PARTS.values() for name, tensor in tensors.items()}
    assert_close(dict(checkpoint), expected, rtol=0, atol=0)
    assert len(checkpoint) == 3
    assert checkpoint.files == list(PARTS)
    assert "a.weight" in checkpoint
    assert "c" not in checkpoint
    assert checkpoint.outline("a.weight").shape == (2, 3)
    assert checkpoint.outline("a.weight").is_meta


def test_one_file_needs_no_index(tmp_path: Path):
    save_file(PARTS["model-00001-of-00002.safetensors"], tmp_path / "model.safetensors")
    assert sorted(Checkpoint.of(tmp_path)) == ["a.bias", "a.weight"]


def without_a_file(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def with_a_file_too_many(directory: Path) -> None:
    save_file({"d": torch.ones(1)}, directory / "model-00003-of-00003.safetensors")


def with_a_name_too_many(directory: Path) -> None:
    write_index(directory, {**read_index(directory), "d.weight": "model-00001-of-00002.safetensors"})


def with_a_name_too_few(directory: Path) -> None:
    places = read_index(directory)
    del places["a.bias"]
    write_index(directory, places)


def with_a_name_in_the_wrong_file(directory: Path) -> None:
    write_index(directory, {**read_index(directory), "a.bias": "model-00002-of-00002.safetensors"})


def with_a_file_elsewhere(directory: Path) -> None:
    outside = directory.parent / "outside.safetensors"
    save_file({"e": torch.ones(1)}, outside)
    write_index(directory, {**read_index(directory), "e": "../outside.safetensors"})


def with_an_absolute_file(directory: Path) -> None:
    write_index(directory, {**read_index(directory), "e": "/etc/passwd"})


def with_a_damaged_file(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (without_a_file, r"names model-00002-of-00002\.safetensors, which are not there"),
    (with_a_file_too_many, r"does not name model-00003-of-00003\.safetensors"),
    (with_a_name_too_many, r"d\.weight \(model-00001-of-00002\.safetensors by the index, nowhere in truth\)"),
    (with_a_name_too_few, r"a\.bias \(nowhere by the index, model-00001-of-00002\.safetensors in truth\)"),
    (with_a_name_in_the_wrong_file, r"a\.bias \(model-00002.* by the index, model-00001.* in truth\)"),
    (with_a_file_elsewhere, r"outside its directory: \.\./outside\.safetensors"),
    (with_an_absolute_file, r"outside its directory: /etc/passwd"),
    (with_a_damaged_file, "is damaged"),
    (lambda directory: (directory / INDEX).write_text("{"), "is no checkpoint index"),
    (lambda directory: (directory / INDEX).write_text("[]"), "is no checkpoint index"),
    (lambda directory: write_index(directory, ["a"]), "is no checkpoint index"),
    (lambda directory: (directory / INDEX).unlink(), "holds no checkpoint"),
]


@pytest.mark.parametrize(("break_it", "says"), WRONG)
def test_an_index_that_is_not_true_is_refused(break_it: Callable[[Path], object], says: str, directory: Path):
    break_it(directory)
    with pytest.raises(FileError, match=says):
        Checkpoint.of(directory)


def test_other_directories_are_refused_with_what_to_do(tmp_path: Path):
    with pytest.raises(FileError, match="no directory"):
        Checkpoint.of(tmp_path / "none")
    with pytest.raises(FileError, match=r"expected model\.safetensors"):
        Checkpoint.of(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(FileError, match="is a PEFT adapter"):
        Checkpoint.of(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileError, match=r"pickles.*save_pretrained"):
        Checkpoint.of(tmp_path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), min_size=5),
    data=st.data(),
)
def test_overwriting_changes_the_given_tensors_alone(tmp_path: Path, shapes, dtypes, data):
    tensors = {
        f"t{place}": torch.randn(shape).to(dtype)
        for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    path = tmp_path / "some.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    chosen = data.draw(st.sets(st.sampled_from(sorted(tensors))))
    size = path.stat().st_size
    with overwriting(path) as put:
        for name in chosen:
            # Also of a tensor that does not lie in a row.
            put(name, (-tensors[name]).mT.contiguous().mT if tensors[name].dim() > 1 else -tensors[name])
    found = load_file(path)
    assert path.stat().st_size == size
    for name, tensor in tensors.items():
        assert torch.equal(found[name], -tensor if name in chosen else tensor)
        assert found[name].dtype == tensor.dtype


def test_a_tensor_of_another_size_does_not_fit(directory: Path):
    path = directory / "model-00001-of-00002.safetensors"
    with overwriting(path) as put, pytest.raises(FileError, match=r"a\.bias takes 12 bytes"):
        put("a.bias", torch.ones(3))
