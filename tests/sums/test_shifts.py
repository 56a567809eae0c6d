"""The Gram of a plain 3x3 convolution summed by shift is the Gram of its unfolded rows."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from networks import CONVOLUTIONS
from unmerge.collecting.unfolding import rows
from unmerge.sums.moments import Moments
from unmerge.sums.shifts import ShiftedMoments, applies


def images(*shape: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, 2, 3, padding=1)


@given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    channels=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    channels_last=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_moments_are_those_of_the_unfolded_rows_for_any_size_and_split(
    height, width, channels, sizes, channels_last
):
    batches = [images(size, channels, height, width, seed=place, mean=0.7) for place, size in enumerate(sizes)]
    if channels_last:
        batches = [batch.to(memory_format=torch.channels_last) for batch in batches]
    shifted, unfolded = ShiftedMoments(), [rows(plain(channels), batch) for batch in batches]
    for batch, expected in zip(batches, unfolded, strict=True):
        assert_close(shifted.update(batch), expected.sum(1))
    found, expected = shifted.finish(), Moments.of(torch.cat(unfolded).flatten(0, 1))
    assert found.n == expected.n
    assert_close(found.mean, expected.mean)
    assert_close(found.scatter, expected.scatter)


def test_images_of_different_sizes_are_counted_together():
    batches = [images(2, 3, 5, 4), images(1, 3, 2, 7, seed=1), images(3, 3, 1, 1, seed=2)]
    shifted = ShiftedMoments()
    for batch in batches:
        shifted.update(batch)
    expected = Moments.of(torch.cat([rows(plain(3), batch).flatten(0, 1) for batch in batches]))
    assert_close(shifted.finish().scatter, expected.scatter)


def test_float32_keeps_a_mean_of_ten_deviations():
    batch = images(8, 3, 6, 6, mean=10).float()
    shifted = ShiftedMoments()
    shifted.update(batch)
    found, expected = shifted.finish(), Moments.of(rows(plain(3), batch.double()).flatten(0, 1))
    assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    assert_close(found.scatter.double(), expected.scatter, rtol=1e-4, atol=1e-4 * expected.scatter.abs().max())


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_it_applies_only_to_a_plain_3x3_convolution(kind):
    assert applies(CONVOLUTIONS[kind](), images(2, 4, 6, 7)) == (kind == "plain")


def test_same_padding_of_3x3_is_plain_and_an_unbatched_or_far_input_is_not():
    assert applies(nn.Conv2d(3, 2, 3, padding="same"), images(2, 3, 5, 5))
    assert not applies(nn.Conv2d(3, 2, 3, padding="valid"), images(2, 3, 5, 5))
    assert not applies(plain(3), images(3, 5, 5))
    assert not applies(plain(3), images(2, 3, 5, 5, mean=300))
    assert not applies(nn.Linear(3, 2), images(2, 3))
    one_far = images(2, 3, 5, 5)
    one_far[:, 1] = 3 + 0.01 * one_far[:, 1]
    assert not applies(plain(3), one_far)


def test_asking_about_a_single_value_a_channel_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applies(plain(3), images(1, 3, 1, 1))
