"""How bases lie to inputs: every number equals what all rows give, computed directly in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from torch import Tensor

from unmerge.diagnosing import geometry
from unmerge.solving import bases, solvers

SLACK = 1 + 1e-9
TIGHT = {"rtol": 1e-8, "atol": 1e-10}
weights = st.floats(0, 50)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(seed: int, features: int, rank: int) -> Tensor:
    return torch.linalg.qr(normal(seed, features, rank))[0]


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Inputs of one layer with some covariance and some mean; fewer than features as well."""
    seed, features = draw(st.integers(0, 10_000)), draw(st.integers(2, 9))
    mixed = normal(seed, draw(st.integers(2, 25)), features) @ normal(seed + 1, features, features)
    return mixed + normal(seed + 2, features)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two orthonormal bases in one space, of any ranks."""
    features, seed = draw(st.integers(2, 10)), draw(st.integers(0, 10_000))
    ranks = [draw(st.integers(1, features)) for _ in range(2)]
    return orthonormal(seed, features, ranks[0]), orthonormal(seed + 1, features, ranks[1])


def second_moment(inputs: Tensor) -> Tensor:
    return inputs.T @ inputs / len(inputs)


def scatter(inputs: Tensor) -> Tensor:
    centred = inputs - inputs.mean(0)
    return centred.T @ centred


def mean_response(matrix: Tensor, inputs: Tensor) -> Tensor:
    """The mean of ‖A x‖², row by row."""
    return torch.stack([(matrix @ row).norm() ** 2 for row in inputs]).mean()


# Overlap, angles, gains


@settings(max_examples=50, deadline=None)
@given(pair=spans())
def test_the_overlap_of_a_direction_is_the_length_of_its_projection_on_the_retain_span(
    pair: tuple[Tensor, Tensor],
) -> None:
    forget, retain = pair
    found = geometry.overlaps(forget, retain)
    expected = torch.stack([(retain @ (retain.T @ direction)).norm() for direction in forget.T])
    torch.testing.assert_close(found, expected, **TIGHT)
    assert found.max() <= 1


@settings(max_examples=50, deadline=None)
@given(pair=spans())
def test_cosines_are_those_of_the_principal_angles(pair: tuple[Tensor, Tensor]) -> None:
    forget, retain = pair
    found = geometry.cosines(forget, retain)
    expected = torch.from_numpy(subspace_angles(forget.numpy(), retain.numpy())).cos().flip(0)
    torch.testing.assert_close(found, expected.clamp_min(0), rtol=1e-7, atol=1e-9)
    assert (found.diff() <= 0).all()
    # Both measure ‖C‖²: by direction of the basis, and by principal direction.
    overlaps = geometry.overlaps(forget, retain)
    torch.testing.assert_close(overlaps.square().sum(), found.square().sum(), **TIGHT)


@settings(max_examples=30, deadline=None)
@given(pair=spans(), seed=st.integers(0, 1000))
def test_angles_depend_on_the_spans_and_not_on_their_bases(pair: tuple[Tensor, Tensor], seed: int) -> None:
    forget, retain = pair
    turned = forget @ orthonormal(seed, forget.shape[1], forget.shape[1])
    torch.testing.assert_close(geometry.cosines(turned, retain), geometry.cosines(forget, retain), **TIGHT)


def test_private_shared_and_halfway_directions() -> None:
    axes = torch.eye(4, dtype=torch.float64)
    halfway = (axes[:, 2] + axes[:, 3]) / math.sqrt(2)
    forget = torch.stack([axes[:, 0], axes[:, 1], halfway], dim=1)
    retain = torch.stack([axes[:, 1], axes[:, 2]], dim=1)
    assert geometry.overlaps(forget, retain).tolist() == pytest.approx([0, 1, math.sqrt(0.5)])
    assert geometry.cosines(forget, retain).tolist() == pytest.approx([1, math.sqrt(0.5)])
    # Corollary 1: a private direction keeps 1/(1 + γ), a shared one 1/(1 + γ + λ).
    found = geometry.gains(torch.tensor([0.0, 1.0, math.sqrt(0.5)], dtype=torch.float64), lam=10.0, gamma=0.25)
    assert found.tolist() == pytest.approx([1 / 1.25, 1 / 11.25, 1 / 6.25])


@settings(max_examples=40, deadline=None)
@given(pair=spans(), lam=weights, gamma=weights, seed=st.integers(0, 1000))
def test_gains_are_what_the_exact_solver_keeps_along_each_principal_direction(
    pair: tuple[Tensor, Tensor], lam: float, gamma: float, seed: int
) -> None:
    forget, retain = pair
    projection = normal(seed, 3, forget.shape[1])
    overlap = forget.T @ retain
    kept = solvers.exact(projection, overlap, lam, gamma)
    principal = torch.linalg.svd(overlap)[0]
    gains = geometry.gains(geometry.cosines(forget, retain), lam, gamma)
    for place, gain in enumerate(gains):
        direction = principal[:, place]
        torch.testing.assert_close(kept @ direction, gain * (projection @ direction), rtol=1e-6, atol=1e-9)


# Variance


@settings(max_examples=40, deadline=None)
@given(inputs=rows(), rank=st.integers(1, 9), seed=st.integers(0, 1000))
def test_the_captured_share_is_that_of_the_centred_rows(inputs: Tensor, rank: int, seed: int) -> None:
    features = inputs.shape[1]
    basis = orthonormal(seed, features, min(rank, features))
    centred = inputs - inputs.mean(0)
    expected = (centred @ basis).square().sum() / centred.square().sum()
    found = geometry.captured_share(scatter(inputs), basis)
    torch.testing.assert_close(found, expected, **TIGHT)
    assert 0 <= found <= SLACK
    best = geometry.captured_share(scatter(inputs), bases.pca(scatter(inputs), basis.shape[1]))
    assert best >= found - 1e-9, "no basis of its rank holds more than the leading eigenvectors"


@settings(max_examples=40, deadline=None)
@given(inputs=rows())
def test_the_effective_rank_counts_the_directions_that_share_the_variance(inputs: Tensor) -> None:
    variances = torch.linalg.svdvals(inputs - inputs.mean(0)).square()
    found = geometry.effective_rank(scatter(inputs))
    torch.testing.assert_close(found, variances.sum() ** 2 / variances.square().sum(), **TIGHT)
    assert found * SLACK >= 1
    assert found <= SLACK * min(inputs.shape[1], len(inputs) - 1)


@pytest.mark.parametrize("equal", [1, 3, 8])
def test_equal_variance_in_some_directions_has_that_effective_rank(equal: int) -> None:
    basis = orthonormal(0, 8, equal)
    assert geometry.effective_rank(7.5 * basis @ basis.T).item() == pytest.approx(equal)


def test_inputs_that_do_not_vary_have_no_share_and_no_rank() -> None:
    nothing = torch.zeros(5, 5)
    assert geometry.captured_share(nothing, orthonormal(0, 5, 2)) == 0
    assert geometry.effective_rank(nothing) == 0


@settings(max_examples=40, deadline=None)
@given(inputs=rows(), units=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_response_is_the_mean_over_rows_exactly(inputs: Tensor, units: int, seed: int) -> None:
    matrix = normal(seed, units, inputs.shape[1])
    torch.testing.assert_close(geometry.response(matrix, second_moment(inputs)), mean_response(matrix, inputs), **TIGHT)


# Proposition 1


@settings(max_examples=60, deadline=None)
@given(inputs=rows(), rank=st.integers(0, 9), units=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_bound_of_an_eigenbasis_is_the_written_one_and_holds(
    inputs: Tensor, rank: int, units: int, seed: int
) -> None:
    matrix, moment = normal(seed, units, inputs.shape[1]), second_moment(inputs)
    rank = min(rank, len(moment))
    values, vectors = torch.linalg.eigh(moment)
    values, basis = values.flip(0).clamp_min(0), vectors.flip(1)[:, :rank]
    tail = values[rank] if rank < len(values) else 0.0
    expected = values[0] * (matrix @ basis @ basis.T).square().sum() + tail * matrix.square().sum()
    found = geometry.response_bound(matrix, moment, basis, is_eigenbasis=True)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert mean_response(matrix, inputs) <= SLACK * found + 1e-12


@settings(max_examples=60, deadline=None)
@given(inputs=rows(), rank=st.integers(0, 9), units=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_bound_of_any_basis_is_the_written_one_and_holds(inputs: Tensor, rank: int, units: int, seed: int) -> None:
    matrix, moment = normal(seed, units, inputs.shape[1]), second_moment(inputs)
    basis = orthonormal(seed + 1, len(moment), min(rank, len(moment)))
    outside = torch.eye(len(moment), dtype=torch.float64) - basis @ basis.T
    largest = torch.linalg.matrix_norm(moment, 2)
    left = torch.linalg.matrix_norm(outside @ moment @ outside, 2)
    expected = 2 * largest * (matrix @ basis @ basis.T).square().sum() + 2 * left * matrix.square().sum()
    found = geometry.response_bound(matrix, moment, basis)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert mean_response(matrix, inputs) <= SLACK * found + 1e-12


def test_an_eigenbasis_needs_half_the_bound_of_another() -> None:
    moment = second_moment(normal(0, 40, 7) @ normal(1, 7, 7))
    basis, matrix = bases.pca(moment, 3), normal(2, 4, 7)
    general = geometry.response_bound(matrix, moment, basis)
    torch.testing.assert_close(geometry.response_bound(matrix, moment, basis, is_eigenbasis=True), general / 2)


def test_wide_layers_have_the_written_bound_too() -> None:
    """Above 1024 features eigenvalues are iterated."""
    features = 1100
    inputs = normal(0, 150, features) * (1 + torch.arange(features)) ** -0.3 + 0.05 * normal(1, features)
    matrix, basis, moment = normal(2, 5, features), orthonormal(3, features, 4), second_moment(inputs)
    outside = inputs - inputs @ basis @ basis.T
    largest, left = (torch.linalg.svdvals(part)[0] ** 2 / len(inputs) for part in (inputs, outside))
    expected = 2 * largest * (matrix @ basis).square().sum() + 2 * left * matrix.square().sum()
    found = geometry.response_bound(matrix, moment, basis)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert mean_response(matrix, inputs) <= found


# What is empty or zero


def test_an_empty_basis_overlaps_with_nothing_and_holds_nothing() -> None:
    nothing, span = orthonormal(0, 5, 0), orthonormal(0, 5, 2)
    assert geometry.overlaps(nothing, span).shape == (0,)
    assert geometry.overlaps(span, nothing).tolist() == [0, 0]
    assert geometry.cosines(nothing, span).shape == (0,)
    assert geometry.cosines(span, nothing).shape == (0,)
    assert geometry.captured_share(torch.eye(5), nothing) == 0
    moment, matrix = 3 * torch.eye(5, dtype=torch.float64), normal(1, 2, 5)
    torch.testing.assert_close(geometry.response_bound(matrix, moment, nothing), 6 * matrix.square().sum())
