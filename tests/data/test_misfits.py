"""Inputs that a model cannot take are described in one error; what is not theirs passes as it was raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unmerge
from decoders import decoder
from networks import cnn, hf_vit, mlp, request
from unmerge.data.batches import feed
from unmerge.errors import DataError, LayerError

CHECK = "Check that the data have the channels, size and type that the model was trained with, or pass forward="


class Square(nn.Module):
    """A model that looks at its inputs itself."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != images.shape[-2]:
            raise AssertionError("Wrong image height!\nExpected a square.")
        return images.flatten(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "channels": (
        cnn,
        torch.zeros(4, 1, 6, 6, dtype=torch.float64),
        RuntimeError,
        "inputs of shape (4, 1, 6, 6) (float64): Given groups=1",
    ),
    "features": (mlp, torch.zeros(4, 5, dtype=torch.float64), RuntimeError, "inputs of shape (4, 5) (float64): mat1"),
    "type": (mlp, torch.zeros(4, 6, dtype=torch.int64), RuntimeError, "inputs of shape (4, 6) (int64): "),
    "channels of transformers": (
        hf_vit,
        {"pixel_values": torch.zeros(2, 1, 8, 8)},
        ValueError,
        "pixel_values of shape (2, 1, 8, 8) (float32): Make sure that the channel dimension",
    ),
    "no such entry": (
        mlp,
        {"images": torch.zeros(2, 6)},
        TypeError,
        "images of shape (2, 6) (float32): ",
    ),
    "a word too many": (
        lambda: decoder("llama"),
        {"input_ids": torch.full((2, 3), 10**6)},
        IndexError,
        "input_ids of shape (2, 3) (int64): index out of range",
    ),
    "size": (
        Square,
        torch.zeros(2, 3, 4, 5),
        AssertionError,
        "inputs of shape (2, 3, 4, 5) (float32): Wrong image height! Expected a square. Check",
    ),
    "no tensor": (mlp, "text", TypeError, "inputs of type str: "),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_has_the_shape_the_models_own_words_and_what_to_check(case: str) -> None:
    make, batch, kind, words = CASES[case]
    with pytest.raises(DataError) as refused:
        feed(make(), batch)
    message = str(refused.value)
    assert message.startswith(f"the model raised {kind.__name__} when it was given ")
    assert words in message
    assert CHECK in message
    assert "\n" not in message
    assert type(refused.value.__cause__) is kind


def test_a_long_complaint_is_shortened() -> None:
    class Verbose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("word " * 1000)

    with pytest.raises(DataError, match=r"word \.\.\. Check") as refused:
        feed(Verbose(), torch.zeros(1))
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize("ask", ["collect", "fit", "diagnose", "recalibrate"])
def test_it_is_told_wherever_data_meet_a_model(ask: str) -> None:
    model, (forget, retain) = cnn(), request((3, 6, 6))
    grey = [(images[:, :1], labels) for images, labels in (forget, retain)]
    edit = unmerge.fit(model, [forget], [retain], init="zero")
    calls: dict[str, Callable[[], object]] = {
        "collect": lambda: unmerge.collect(model, grey),
        "fit": lambda: unmerge.fit(model, grey[:1], grey[1:], init="zero"),
        "diagnose": lambda: unmerge.diagnose(grey[:1], grey[1:], model),
        "recalibrate": lambda: edit.apply(model, 1.0, recalibrate=grey[1:]),
    }
    with pytest.raises(DataError, match=r"\(\d+, 1, 6, 6\).*expected input.*to have 3 channels"):
        calls[ask]()


class Own(RuntimeError):
    pass


OTHERS: dict[str, BaseException] = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "memory in words": RuntimeError("MPS backend out of memory"),
    "memory of the CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
    "a GPU": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "another process": torch.distributed.DistBackendError("NCCL timeout"),
    "a key": KeyboardInterrupt(),
    "a model's own": Own("not today"),
    "another kind": AttributeError("no attribute"),
    "one of unmerge": LayerError("layers 'a' and 'b' received the same input at first but not later"),
    "one of unmerge on data": DataError("a batch holds no sample"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_of_the_inputs_passes_as_it_is(kind: str) -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise OTHERS[kind]

    with pytest.raises(type(OTHERS[kind])) as raised:
        feed(Raising(), torch.zeros(1))
    assert raised.value is OTHERS[kind]
    assert raised.value.__cause__ is None


def test_a_function_of_ones_own_speaks_for_itself() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        feed(mlp(), torch.zeros(4, 5, dtype=torch.float64), lambda model, batch: model(batch))
    assert type(raised.value) is RuntimeError
