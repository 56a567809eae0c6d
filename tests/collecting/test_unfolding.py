"""Rows times the weight matrix plus the bias is what a module returns, for every geometry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from networks import CONVOLUTIONS, conv1d_net
from unmerge.collecting import unfolding
from unmerge.collecting.unfolding import agrees, channels_first, chunks, geometry, rows, rows_taps_first
from unmerge.model.layers import weight_matrix


def product(module: nn.Module, inputs: Tensor) -> Tensor:
    """rows · weightᵀ + bias in the layout of the module's output."""
    matrix = weight_matrix(module)
    found = rows(module, inputs)
    if found.dim() == 4:
        found = torch.cat([one @ own.mT for one, own in zip(found, matrix, strict=True)], dim=-1)
    else:
        found = found @ matrix.mT
    return found if module.bias is None else found + module.bias


def images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def assert_convolves(module: nn.Conv2d, inputs: Tensor) -> None:
    expected = module(inputs)
    assert_close(product(module, inputs), expected.flatten(2).mT)
    assert agrees(module, inputs, expected, weight_matrix(module))


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_rows_times_the_weight_is_the_convolution(kind):
    assert_convolves(CONVOLUTIONS[kind]().double(), images(3, 4, 6, 7))


sides = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(
    kernel=sides,
    stride=sides,
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.just("same") | st.just("valid") | st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    groups=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    size=st.tuples(st.integers(5, 8), st.integers(5, 8)),
    channels_last=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_any_geometry_of_a_convolution_unfolds(
    kernel, stride, dilation, padding, mode, groups, bias, size, channels_last
):
    assume(padding != "same" or stride == (1, 1))
    module = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, bias, padding_mode=mode).double()
    inputs = images(2, 4, *size)
    inputs = inputs.to(memory_format=torch.channels_last) if channels_last else inputs
    assert_convolves(module, inputs)
    if groups == 1:
        for given_as in (inputs, inputs.bfloat16()):
            moved = rows_taps_first(module, given_as)
            assert moved[..., channels_first(module)].equal(rows(module, given_as))


def test_an_unbatched_image_and_a_view_unfold():
    module = CONVOLUTIONS["groups"]().double()
    image = images(4, 6, 7)
    assert_close(product(module, image)[0], module(image).flatten(1).mT)
    assert agrees(module, image, module(image), weight_matrix(module))
    assert_convolves(module, images(3, 8, 12, 14)[1:, 2:6, ::2, 1::2])


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 5, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("module", [nn.Linear(6, 5).double(), conv1d_net(6, 5)[0]], ids=["linear", "conv1d"])
def test_rows_times_the_weight_is_the_linear_layer(module, shape):
    inputs = images(*shape)
    expected = module(inputs)
    assert_close(product(module, inputs).reshape(expected.shape), expected)
    assert agrees(module, inputs, expected, weight_matrix(module))
    if len(shape) > 1:
        assert rows(module, inputs).shape[0] == shape[0]  # so that rows can be told apart by sample


def test_chunks_are_the_rows_in_order_and_of_bounded_size(monkeypatch):
    module = CONVOLUTIONS["groups"]().double()
    inputs = images(7, 4, 6, 7)
    one = rows(module, inputs[:1]).numel()
    monkeypatch.setitem(unfolding.CHUNK, "cpu", 2 * one)
    parts = list(chunks(module, inputs))
    assert [part.numel() for _, part in parts] == [2 * one, 2 * one, 2 * one, one]
    assert torch.cat([part for _, part in parts], dim=1).equal(rows(module, inputs))
    assert torch.cat([inputs[where] for where, _ in parts]).equal(inputs)


class SamePadding(nn.Conv2d):
    """TensorFlow's "same" padding for any stride, as timm and EfficientNet ports have it."""

    def forward(self, inputs: Tensor) -> Tensor:
        sides: list[int] = []
        for size, kernel, stride in zip(inputs.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            sides += [total // 2, total - total // 2]
        return functional.conv2d(functional.pad(inputs, sides), self.weight, self.bias, self.stride)


class Standardised(nn.Conv2d):
    """A convolution that standardises its weight at every call."""

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(inputs, weight / weight.std(), self.bias, self.stride, self.padding)


class Scaled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 1.5 * super().forward(inputs)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (SamePadding(4, 6, 3, stride=2), (2, 4, 6, 6)),
        (SamePadding(4, 6, 3), (2, 4, 6, 6)),
        (Standardised(4, 6, 3, padding=1), (2, 4, 6, 6)),
        (Scaled(4, 6), (2, 4)),
    ],
    ids=["same-stride", "same", "standardised", "scaled"],
)
def test_a_module_that_does_something_of_its_own_disagrees(module, shape):
    module = module.double()
    inputs = images(*shape)
    assert not agrees(module, inputs, module(inputs), weight_matrix(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_disagreement(dtype):
    module = nn.Linear(512, 32).to(dtype)
    inputs = images(4, 512, dtype=dtype)
    assert agrees(module, inputs, module(inputs), weight_matrix(module))


def test_geometry_is_equal_exactly_where_the_rows_are():
    inputs = images(2, 4, 6, 7)
    modules = {kind: make().double() for kind, make in CONVOLUTIONS.items()}
    for one in modules.values():
        for other in modules.values():
            if geometry(one) == geometry(other):
                assert rows(one, inputs).equal(rows(other, inputs))
    assert len({geometry(module) for module in modules.values()}) == len(modules)
    assert geometry(nn.Linear(4, 6)) == geometry(nn.Linear(4, 9)) != geometry(modules["plain"])
