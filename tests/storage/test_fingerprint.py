"""A checksum sees every change of a tensor and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from networks import cnn
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import _SMALL, differences, fingerprint

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def checksum(tensor: Tensor) -> str:
    return fingerprint({"tensor": tensor})["tensor"]


@pytest.mark.parametrize("dtype", DTYPES)
@given(size=st.integers(1, 70), data=st.data())
@settings(max_examples=15, deadline=None)
def test_one_flipped_bit_changes_the_checksum(dtype, size, data):
    tensor = values(size, dtype=dtype)
    flipped = tensor.clone()
    if dtype == torch.bool:
        place = data.draw(st.integers(0, size - 1))
        flipped[place] = ~flipped[place]
    else:
        raw = flipped.view(torch.uint8)
        place, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
        raw[place] ^= 1 << bit
    assert checksum(flipped) != checksum(tensor)


@given(st.permutations(range(9)))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_values_counts(order):
    tensor = torch.arange(9.0)
    assert (checksum(tensor[order]) == checksum(tensor)) == (list(order) == sorted(order))


def test_type_shape_and_the_sign_of_zero_count():
    tensor = torch.zeros(4, 6)
    others = [tensor.reshape(6, 4), tensor.to(torch.int32), tensor.half(), -tensor, torch.zeros(4, 7)]
    assert len({checksum(tensor), *map(checksum, others)}) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_a_tensor_lies_in_memory_does_not_count(dtype):
    tensor = values(3, 4, dtype=dtype)
    expected = checksum(tensor)
    assert checksum(tensor.clone()) == expected
    assert checksum(tensor.T.contiguous().T) == expected
    for offset in range(1, 5):  # a view into a larger buffer, as flattened parameters are
        buffer = torch.zeros(12 + offset, dtype=dtype)
        view = buffer[offset:].view(3, 4)
        view.copy_(tensor)
        assert checksum(view) == expected


def test_neither_do_the_tensors_beside_it():
    tensors = {
        "a": values(50),
        "empty": torch.zeros(0),
        "b": values(3, 7, dtype=torch.int8),
        "large": values(3_000_000, dtype=torch.int8),
        "c": torch.tensor(1.5),
        "nothing": torch.zeros(2, 0),
    }
    assert fingerprint(tensors) == {name: checksum(tensor) for name, tensor in tensors.items()}


def test_how_many_are_summed_in_one_go_does_not_count(monkeypatch):
    """Also of a tensor that has no whole words and more bytes than a chunk has places."""
    tensors = {"odd": values(1030, 1033, dtype=torch.int8)[:, :-2], "even": values(700, 900), "few": values(3)}
    expected = fingerprint(tensors)
    monkeypatch.setitem(_SMALL, "cpu", 1 << 20)  # as on a GPU
    assert fingerprint(tensors) == expected
    monkeypatch.setitem(_SMALL, "cpu", 0)
    assert fingerprint(tensors) == expected


def test_every_place_of_a_large_tensor_counts():
    tensor = values(5_000_000)
    expected = checksum(tensor)
    far = [0, 1, 2**14, 2**20 - 1, 2**20, 2**21, 2**22 + 7, len(tensor) - 1]
    for place in far:
        tensor[place] += 1
        assert checksum(tensor) != expected
        tensor[place] -= 1
    for one, other in pairwise(far):
        tensor[[one, other]] = torch.tensor([1e6, 2e6])
        swapped = tensor.clone()
        swapped[[one, other]] = torch.tensor([2e6, 1e6])
        assert checksum(swapped) != checksum(tensor)


def test_nothing_has_no_checksums():
    assert fingerprint({}) == {}


def test_the_state_of_a_model_is_every_parameter_and_buffer():
    model = cnn()
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model.twin = model.fc
    names = set(state_of(model))
    assert names == {*model.state_dict(), "scratch"}
    assert {"twin.weight", "fc.weight", "bn1.num_batches_tracked"} <= names
    model.scratch.zero_()
    assert state_of(model)["scratch"].sum() == 0  # the model's own tensors


def test_differences_are_named_in_order_whichever_side_they_stand_on():
    expected = fingerprint({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    found = fingerprint({"d": torch.zeros(2), "c": torch.ones(2), "a": torch.zeros(2)})
    assert differences(found, expected) == ["b", "c", "d"]
    assert differences(expected, expected) == []
    assert differences(found, expected, ["a", "c"]) == ["c"]
