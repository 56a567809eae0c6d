"""Outputs: saved and read back, and brought into one order."""

from pathlib import Path

import pytest
import torch

from networks import batched, mlp, request
from unmerge.errors import DataError, FileError, UnmergeWarning
from unmerge.evaluation import Outputs, outputs
from unmerge.evaluation.predictions import SplitOutputs, aligned


def some(seed: int = 0, classes: int = 4, keep: int = 5) -> Outputs:
    forget, retain = request((6,), each=8, seed=seed)
    return outputs(mlp((6, 7, classes)), {"forget": batched(forget, 3), "retain": [retain]}, keep_features=keep)


@pytest.mark.parametrize("keep", [5, 0])
def test_round_trip(tmp_path: Path, keep: int) -> None:
    first = some(keep=keep)
    first.save(tmp_path / "o.safetensors")
    second = Outputs.load(tmp_path / "o.safetensors")
    assert list(second.splits) == ["forget", "retain"]
    assert second.feature_layer == first.feature_layer
    for name, part in first.splits.items():
        for field in ("logits", "labels", "keys", "features", "rows"):
            own, other = getattr(part, field), getattr(second[name], field)
            assert (own is None and other is None) or torch.equal(own, other)


def test_half_precision(tmp_path: Path) -> None:
    first = some()
    first.save(tmp_path / "full.safetensors")
    first.save(tmp_path / "half.safetensors", half=True)
    second = Outputs.load(tmp_path / "half.safetensors")
    assert second["retain"].logits.dtype == torch.float32
    assert torch.allclose(second["retain"].logits, first["retain"].logits, atol=1e-2)
    assert torch.equal(second["retain"].keys, first["retain"].keys)
    assert (tmp_path / "half.safetensors").stat().st_size < (tmp_path / "full.safetensors").stat().st_size
    huge = SplitOutputs(torch.full((1, 2), 1e6), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(FileError, match="half=False"):
        Outputs({"test": huge}).save(tmp_path / "x", half=True)
    removed = SplitOutputs(torch.tensor([[-1e4, 0.0]]), torch.tensor([0]), torch.tensor([0]))
    Outputs({"test": removed}).save(tmp_path / "x", half=True)


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no file"):
        Outputs.load(tmp_path / "none")


def test_alignment_undoes_a_shuffle() -> None:
    first = some()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    moved = Outputs(dict(first.splits) | {"retain": first["retain"].reordered(order)}, first.feature_layer)
    features = {
        int(moved["retain"].keys[row]): value
        for row, value in zip(moved["retain"].rows, moved["retain"].features, strict=True)
    }
    back = aligned(moved, first, "m")["retain"]
    assert torch.equal(back.logits, first["retain"].logits)
    assert torch.equal(back.rows, first["retain"].rows)
    for row, value in zip(first["retain"].rows, first["retain"].features, strict=True):
        assert torch.equal(features[int(first["retain"].keys[row])], value)


def test_other_samples_are_refused_and_other_inputs_warned_of() -> None:
    first = some()
    with pytest.raises(DataError, match="'m' has 3 classes, the one it is compared with 4"):
        aligned(some(classes=3), first, "m")
    part = first["forget"]
    short = SplitOutputs(part.logits[:4], part.labels[:4], part.keys[:4])
    with pytest.raises(DataError, match=r"other samples \(4 against 8\)"):
        aligned(Outputs({"forget": short}), first, "m")
    augmented = SplitOutputs(part.logits, part.labels, part.keys + 1)
    with pytest.warns(UnmergeWarning, match="same order"):
        aligned(Outputs({"forget": augmented}), first, "m")
    with pytest.raises(DataError, match="no split 'retin'"):
        first["retin"]
