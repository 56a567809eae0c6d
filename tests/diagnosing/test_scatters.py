"""A scatter by its products is that of the rows, and so are sums and differences of such scatters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmerge.diagnosing.scatters import Scatter
from unmerge.errors import StatisticsError
from unmerge.sums.moments import Moments


def rows_of(count: int, features: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows about a mean of their own."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, features, generator=generator, dtype=torch.float64) + seed % 5).to(dtype)


def direct(rows: Tensor) -> Tensor:
    centred = rows.double() - rows.double().mean(0)
    return centred.mT @ centred


@settings(max_examples=40, deadline=None)
@given(
    counts=st.tuples(st.integers(1, 20), st.integers(2, 30), st.integers(1, 20)),
    features=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_the_rows(counts: tuple[int, int, int], features: int, seed: int) -> None:
    first, second, third = (rows_of(count, features, seed + place) for place, count in enumerate(counts))
    kept = torch.cat([second, third])  # of which a part is taken out again
    block = rows_of(features, 3, seed)
    one, other, part = (Scatter.of(Moments.of(rows)) for rows in (first, kept, third))
    for found, rows in (
        (one, first),
        (one + other, torch.cat([first, kept])),
        (other - part, second),
        (one + other - part, torch.cat([first, second])),
    ):
        assert found.n == len(rows)
        torch.testing.assert_close(found.mean, rows.mean(0))
        torch.testing.assert_close(found @ block, direct(rows) @ block, rtol=1e-8, atol=1e-7)
        torch.testing.assert_close(found.in_one() @ block, found @ block, rtol=1e-8, atol=1e-7)
        assert len(found.in_one().grams) == 1


def test_sums_hold_no_matrix_of_their_own_until_they_are_asked_to() -> None:
    first, second = (Moments.of(rows_of(50, 40, seed, torch.float32)).settle_() for seed in (0, 1))
    before = first.gram.clone()
    found = Scatter.of(first) + Scatter.of(second) - Scatter.of(first)
    assert [(sign, id(gram)) for sign, gram in found.grams] == [
        (1, id(first.gram)),
        (1, id(second.gram)),
        (-1, id(first.gram)),
    ]
    assert found.columns.shape == (40, 5)
    image = found @ rows_of(40, 4, 0, torch.float32)
    assert image.dtype == found.like.dtype == torch.float32
    found.in_one()
    assert torch.equal(first.gram, before)


def test_more_rows_than_there_are_cannot_be_taken_out() -> None:
    few, many = (Scatter.of(Moments.of(rows_of(count, 4, 0))) for count in (5, 9))
    with pytest.raises(StatisticsError, match="cannot take 9 rows out of 5"):
        few - many
