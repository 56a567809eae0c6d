"""Streaming equals batch for any split; moments add and subtract; a large mean keeps its directions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from unmerge import Moments
from unmerge.errors import StatisticsError
from unmerge.linalg.products import full_precision


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(n: int, d: int, seed: int = 0, groups: int | None = None) -> Tensor:
    """Correlated rows with a mean, (n, d) or (groups, n, d)."""
    rows = normal(*(() if groups is None else (groups,)), n, d, seed=seed)
    return rows @ normal(d, d, seed=99) + normal(d, seed=98)


def assert_moments(found: Moments, rows: Tensor, **tolerance: float) -> None:
    """Count, mean and scatter are those of the rows."""
    rows = rows.double()
    mean = rows.mean(-2)
    centred = rows - mean.unsqueeze(-2)
    assert found.n == rows.shape[-2]
    assert_close(found.mean, mean, **tolerance)
    assert_close(found.scatter.double(), centred.mT @ centred, **tolerance)


def streamed(parts: list[Tensor]) -> Moments:
    moments = Moments()
    for part in parts:
        moments.update(part)
    return moments


cuts = st.lists(st.integers(0, 24), max_size=4)


@given(
    n=st.integers(1, 24), d=st.integers(1, 9), cuts=cuts, groups=st.sampled_from([None, 1, 3]), seed=st.integers(0, 5)
)
@settings(max_examples=60, deadline=None)
def test_streaming_equals_batch_for_any_split(n, d, cuts, groups, seed):
    rows = data(n, d, seed, groups)
    bounds = [0, *sorted(min(cut, n) for cut in cuts), n]
    parts = [rows[..., start:stop, :] for start, stop in pairwise(bounds)]
    assert_moments(streamed(parts), rows)


@given(order=st.permutations(range(5)))
@settings(max_examples=20, deadline=None)
def test_streaming_does_not_depend_on_the_order(order):
    parts = list(data(20, 4).split(4))
    assert_moments(streamed([parts[place] for place in order]), torch.cat(parts))


def test_more_features_than_a_block_of_the_gram():
    rows = data(30, 1600)
    assert_moments(streamed(list(rows.split(11))), rows)


def test_reading_between_updates_changes_nothing():
    rows = data(12, 5)
    moments = Moments()
    for part in rows.split(5):
        moments.update(part)
        assert_close(moments.gram, moments.gram.mT)
    assert_moments(moments, rows)


@given(n=st.integers(2, 20), m=st.integers(1, 20), groups=st.sampled_from([None, 2]), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_halves_add_up_to_the_whole_and_a_half_can_be_taken_out_again(n, m, groups, seed):
    rows = data(n + m, 5, seed, groups)
    first, second = Moments.of(rows[..., :n, :]), Moments.of(rows[..., n:, :])
    whole = first + second
    assert_moments(whole, rows)
    assert_moments(whole - second, rows[..., :n, :])
    assert_moments(Moments.of(rows) - first, rows[..., n:, :])


def test_adding_and_subtracting_leave_their_operands_alone():
    rows = data(20, 4)
    first, second = Moments.of(rows[:12]), Moments.of(rows[12:])
    whole = first + second
    (whole - first).update(data(3, 4))
    whole.update(data(5, 4))
    assert_moments(first, rows[:12])
    assert_moments(second, rows[12:])


def test_nothing_counted_is_neutral_and_has_no_mean():
    rows = data(6, 3)
    for found in (Moments.of(rows) + Moments(), Moments() + Moments.of(rows), Moments.of(rows) - Moments()):
        assert_moments(found, rows)
    assert_moments(streamed([rows[:0], rows, rows[:0]]), rows)
    for part in ("mean", "variance", "scatter", "gram", "pivot", "total"):
        with pytest.raises(StatisticsError, match="no rows"):
            getattr(Moments(), part)


def test_a_copy_is_independent_of_the_original():
    rows = data(6, 3)
    moments = Moments.of(rows)
    copy = moments.clone()
    moments.update(rows)
    assert_moments(copy, rows)
    assert_moments(moments, torch.cat([rows, rows]))


def test_scatter_about_a_point_and_covariance():
    rows, centre = data(9, 4), normal(4, seed=5)
    moments = Moments.of(rows)
    assert_close(moments.scatter_about(centre), (rows - centre).T @ (rows - centre))
    assert_close(moments.covariance, torch.cov(rows.T, correction=0))


def test_one_group_of_grouped_moments():
    rows = data(9, 4, groups=3)
    for place in range(3):
        assert_moments(Moments.of(rows).group(place), rows[place])


def test_fewer_rows_than_features_give_a_scatter_of_their_rank():
    rows = data(5, 30)
    moments = streamed(list(rows.split(2)))
    assert_moments(moments, rows)
    assert torch.linalg.matrix_rank(moments.scatter) == 4


def far_from_zero(dtype: torch.dtype) -> Tensor:
    """Rows with mean 300 and deviations from 1 to 0.05 along hidden directions."""
    directions = torch.linalg.qr(normal(16, 16, seed=3))[0]
    spread = torch.logspace(0, -1.3, 16, dtype=torch.float64)
    return (300 + (normal(4000, 16) * spread) @ directions.T).to(dtype)


@pytest.mark.parametrize("split", [4000, 100, 7])
def test_a_mean_of_300_deviations_keeps_its_directions_in_float32(split):
    rows = far_from_zero(torch.float32)
    moments = streamed(list(rows.split(split)))
    assert moments.scatter.dtype == torch.float32
    assert_moments(moments, rows, rtol=1e-3, atol=1e-5 * 4000)
    found = torch.linalg.eigh(moments.scatter.double())[1]
    expected = torch.linalg.eigh(torch.cov(rows.double().T))[1]
    assert ((found * expected).sum(0).abs() > 0.999).all()


def test_a_mean_of_300_deviations_survives_adding_and_subtracting_in_float32():
    rows = far_from_zero(torch.float32)
    whole, part = Moments.of(rows), Moments.of(rows[:1000])
    assert_moments(whole - part, rows[1000:], rtol=1e-3, atol=1e-5 * 4000)
    assert_moments(part + Moments.of(rows[1000:]), rows, rtol=1e-3, atol=1e-5 * 4000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [None, 2])
def test_half_precision_rows_are_summed_in_float32(dtype, groups):
    rows = data(2000, 6, groups=groups).to(dtype)
    moments = streamed(list(rows.split([1, 299, 1700], dim=-2)))
    assert moments.scatter.dtype == torch.float32
    centred = rows.double() - rows.double().mean(-2, keepdim=True)
    expected = centred.mT @ centred
    assert_close(moments.mean, rows.double().mean(-2), rtol=1e-2, atol=1e-2)
    assert_close(moments.scatter.double(), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_feature_far_from_zero_keeps_its_variance_beside_others_that_are_not(dtype):
    rows = normal(4000, 8)
    rows[:, 0] = 9 + 0.05 * rows[:, 0]
    rows = rows.to(dtype)
    found, expected = Moments.of(rows).scatter.double(), Moments.of(rows.double()).scatter
    assert_close(found[0, 0], expected[0, 0], rtol=1e-2, atol=0)


def test_more_rows_than_there_are_cannot_be_taken_out():
    rows = data(6, 3)
    for taken in (rows, data(7, 3)):
        with pytest.raises(StatisticsError, match=f"cannot take {len(taken)} rows out of 6"):
            Moments.of(rows) - Moments.of(taken)


def test_rows_that_were_not_part_cannot_be_taken_out():
    with pytest.raises(StatisticsError, match="not among those counted"):
        Moments.of(data(20, 3)) - Moments.of(50 * data(6, 3, seed=1))


@pytest.mark.parametrize("other", [(6, 4), (2, 6, 3)])
def test_other_features_do_not_combine(other):
    moments = Moments.of(data(9, 3))
    for combine in (Moments.__add__, Moments.__sub__):
        with pytest.raises(StatisticsError, match="features"):
            combine(moments, Moments.of(normal(*other)))
    with pytest.raises(StatisticsError, match="do not fit"):
        moments.update(normal(*other))


@pytest.mark.parametrize("allowed", [True, False])
def test_full_precision_leaves_the_users_setting_also_after_an_exception(allowed):
    def broken() -> None:
        with full_precision():
            assert not torch.backends.cuda.matmul.allow_tf32
            raise KeyError

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        with pytest.raises(KeyError):
            broken()
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def counted(batches: list[Tensor], pivot: Tensor | None) -> Moments:
    moments = Moments(pivot)
    for batch in batches:
        moments.update(batch)
    return moments


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_dealt_out_about_one_pivot_sum_to_the_same_bits(dtype, groups):
    batches = list((data(3000, 40, groups=groups) + 5).to(dtype).split(70, -2))
    pivot = batches[0].mean(-2)
    whole = counted(batches, pivot).gram
    for share in (2, 3):
        parts = [counted(batches[first::share], pivot) for first in range(share)]
        found = sum(parts, start=Moments())
        assert found.gram.dtype == torch.float32
        assert found.gram.equal(whole)
        assert all(part.pivot.equal(pivot.double()) for part in parts)


def test_other_batches_about_another_pivot_settle_to_the_same_bits():
    rows = (data(3000, 40) + 5).float()
    whole = counted(list(rows.split(70)), rows[:70].mean(0)).settle_()
    for size, pivot in ((1, rows[0]), (64, rows[5] + 1), (3000, None)):
        found = counted(list(rows.flip(0).split(size)), pivot).settle_()
        assert found.pivot.equal(whole.pivot)
        assert (found.gram == whole.gram).float().mean() > 0.99, "a last bit may differ"
        assert_close(found.gram, whole.gram, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_counted_on_about_another_pivot(dtype):
    rows = normal(400, 6).to(dtype)
    moments = counted([rows[:100]], None).move_pivot_(torch.full((6,), 2.0, dtype=torch.float64))
    moments.update(rows[100:])
    assert_moments(moments, rows, rtol=1e-5, atol=1e-3)


def test_what_is_settled_stays():
    moments = counted([data(50, 4).float() + 3], None).settle_()
    pivot, gram = moments.pivot.clone(), moments.gram.clone()
    moments.settle_()
    assert moments.pivot.equal(pivot)
    assert moments.gram.equal(gram)
    assert moments.gram.dtype == torch.float32


def test_what_is_counted_in_double_precision_on_the_cpu_is_kept_in_the_rows_own():
    rows = data(50, 4)
    for kind, kept in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        moments = Moments().update(rows.to(kind))
        assert moments.open_sums["gram"].dtype == torch.float64
        copies = [moments.clone(), moments + Moments.of(rows.to(kind)), moments.to("cpu")]
        assert all(part.open_sums["gram"].dtype == torch.float64 for part in copies)
        for part in (moments, *copies):
            assert part.scatter.dtype == part.sums["gram"].dtype == kept
            assert part.settle_().open_sums["gram"].dtype == kept
            assert part.gram.equal(part.gram.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pivot_some_deviations_off_keeps_the_directions_of_a_large_mean(dtype):
    rows = (300 * normal(6, seed=5).sign() + normal(4000, 6)).to(dtype)
    expected = Moments.of(rows.double())
    found = counted(list(rows.split(500)), (expected.mean + 5).to(dtype))
    assert_close(found.scatter.double(), expected.scatter, rtol=1e-4, atol=1e-4 * expected.scatter.abs().max())
    assert_close(found.mean, expected.mean)


def test_a_pivot_that_half_precision_cannot_hold_is_of_other_rows():
    rows = normal(200, 5).bfloat16()
    assert Moments(torch.full((5,), 1.001)).update(rows).pivot.eq(0).all()
    assert Moments(torch.full((5,), 1.0)).update(rows).pivot.eq(1).all()
    assert Moments(torch.full((5,), 1.001)).update(rows.float()).pivot.ne(0).all()


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_the_scatter_about_any_point_is_that_of_the_rows(kind: torch.dtype) -> None:
    rows, centre = data(40, 6).to(kind), normal(6, seed=5)
    moments = Moments.of(rows)
    shifted = rows.double() - centre
    assert moments.about(centre).dtype == torch.float64
    tolerance = {"rtol": 1e-5, "atol": 1e-3} if kind == torch.float32 else {}
    assert_close(moments.about(centre), shifted.mT @ shifted, **tolerance)
    assert_close(moments.about(centre), moments.scatter_about(centre).double(), rtol=1e-4, atol=1e-2)
    assert_moments(moments, rows, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("width", [16, 1100])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_pivot_of_rows_far_away_is_not_taken(kind: torch.dtype, width: int) -> None:
    rows = torch.randn(400, width, generator=torch.Generator().manual_seed(0)).to(kind)
    moments = Moments(torch.full((width,), 512.0))
    for batch in rows.split(50):
        moments.update(batch)
    exact = rows.double() - rows.double().mean(0)
    scatter = exact.mT @ exact
    assert (moments.scatter.double() - scatter).norm() < 1e-5 * scatter.norm()


def test_looking_at_sums_leaves_them_as_they_are() -> None:
    rows = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0)) + 3
    looked, plain = Moments(), Moments()
    for batch in rows.split(10):
        plain.update(batch)
        looked.update(batch).scatter.sum()
    assert torch.equal(looked.scatter, plain.scatter)


def test_sums_that_float32_cannot_hold_are_not_finite() -> None:
    moments = Moments()
    for _ in range(60):
        moments.update(torch.randn(8, 4) * 2e18)
    assert not moments.witness().isfinite()
