"""Tensors are found in a checkpoint by name, by the end of the name, by checksum, or beside another of their module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from unmerge.errors import EditError
from unmerge.interop.locating import located
from unmerge.interop.shards import Checkpoint
from unmerge.storage.fingerprint import fingerprint


def checkpoint_of(directory: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return Checkpoint.of(directory)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(("stored", "asked"), [("model.", ""), ("", "model."), ("", "base.model.")])
def test_a_beginning_may_be_there_or_not(stored: str, asked: str, bound: bool, tmp_path: Path):
    tensors = {"a.fc.weight": drawn(2, 3), "b.fc.weight": drawn(2, 3, seed=1), "b.fc.bias": drawn(2, seed=2)}
    checkpoint = checkpoint_of(tmp_path, {stored + name: tensor for name, tensor in tensors.items()})
    names = {asked + name: tensor for name, tensor in tensors.items()}
    found = located(checkpoint, [*names, f"{asked}c.fc.weight"], fingerprint(names) if bound else {})
    assert_close({name: found[name] for name in names}, names, rtol=0, atol=0)
    assert f"{asked}c.fc.weight" not in found


def test_a_renamed_tensor_is_known_by_its_checksum_and_the_rest_of_its_module_by_its_side(tmp_path: Path):
    stored = {
        "encoder.layer.0.query.weight": drawn(3, 3),
        "encoder.layer.0.query.bias": torch.zeros(3),
        "encoder.layer.0.key.weight": drawn(3, 3, seed=1),
        "encoder.layer.0.key.bias": torch.zeros(3),
    }
    checkpoint = checkpoint_of(tmp_path, stored)
    asked = {
        f"layers.0.{new}.{part}": stored[f"encoder.layer.0.{old}.{part}"]
        for new, old in (("q_proj", "query"), ("k_proj", "key"))
        for part in ("weight", "bias")
    }
    found = located(checkpoint, asked, fingerprint(asked))
    assert found.places["layers.0.q_proj.bias"].name == "encoder.layer.0.query.bias"
    assert found.places["layers.0.k_proj.bias"].name == "encoder.layer.0.key.bias"
    assert_close({name: found[name] for name in asked}, asked, rtol=0, atol=0)


@pytest.mark.parametrize(("stored", "fitted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_another_type_is_no_hindrance(stored: torch.dtype, fitted: torch.dtype, tmp_path: Path):
    weight = drawn(4, 3, dtype=torch.float64)
    checkpoint = checkpoint_of(tmp_path, {"old.weight": weight.to(stored), "other.weight": drawn(4, 3, seed=1)})
    found = located(checkpoint, ["new.weight"], fingerprint({"new.weight": weight.to(stored).to(fitted)}))
    assert_close(found["new.weight"], weight.to(stored), rtol=0, atol=0)


def test_a_name_that_ends_alike_but_has_other_values_gives_way_to_the_right_ones(tmp_path: Path):
    right, wrong = drawn(2, 2), drawn(2, 2, seed=1)
    checkpoint = checkpoint_of(tmp_path, {"decoder.fc.weight": wrong, "encoder.dense.weight": right})
    found = located(checkpoint, ["fc.weight"], fingerprint({"fc.weight": right}))
    assert_close(found["fc.weight"], right, rtol=0, atol=0)
    # With no better one it stays, so that its values can be named as other ones.
    strange = located(checkpoint, ["fc.weight"], fingerprint({"fc.weight": drawn(2, 2, seed=2)}))
    assert strange.places["fc.weight"].name == "decoder.fc.weight"


def test_what_may_be_two_tensors_is_none(tmp_path: Path):
    weight = drawn(2, 2)
    checkpoint = checkpoint_of(tmp_path, {"a.fc.weight": weight, "b.fc.weight": weight})
    assert "fc.weight" not in located(checkpoint, ["fc.weight"], fingerprint({"fc.weight": weight}))


def test_two_names_of_one_tensor_are_refused(tmp_path: Path):
    weight = drawn(2, 2)
    checkpoint = checkpoint_of(tmp_path, {"fc.weight": weight})
    with pytest.raises(EditError, match=r"fc\.weight and x\.fc\.weight are the same tensor"):
        located(checkpoint, ["fc.weight", "x.fc.weight"], fingerprint({"fc.weight": weight, "x.fc.weight": weight}))
