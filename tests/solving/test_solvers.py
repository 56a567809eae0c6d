"""Coefficients: the closed form is the minimiser, the budgeted iterate is Adam's, the threshold its model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from unmerge.solving import solvers

weights = st.floats(0, 100)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A projection (out, k) and the overlap (k, retain rank) of two random orthonormal bases."""
    features = draw(st.integers(2, 12))
    rank, retain_rank = draw(st.integers(1, features)), draw(st.integers(0, features))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    return problem(draw(st.integers(1, 9)), features, rank, retain_rank, generator)


def problem(
    units: int, features: int, rank: int, retain_rank: int, generator: torch.Generator, scale: float = 0.1
) -> tuple[Tensor, Tensor]:
    """τ Q_F and Q_Fᵀ Q_R for random bases and a random task vector."""
    bases = [
        torch.linalg.qr(torch.randn(features, features, generator=generator, dtype=torch.float64))[0][:, :columns]
        for columns in (rank, retain_rank)
    ]
    task_vector = scale * torch.randn(units, features, generator=generator, dtype=torch.float64)
    return task_vector @ bases[0], bases[0].T @ bases[1]


def objective(B: Tensor, projection: Tensor, overlap: Tensor, lam: float, gamma: float) -> Tensor:
    """The projected objective of eq. 2."""
    return (projection - B).square().sum() + lam * (B @ overlap).square().sum() + gamma * B.square().sum()


@settings(max_examples=40, deadline=None)
@given(problem=problems(), lam=weights, gamma=weights)
def test_exact_is_the_closed_form_and_has_no_gradient(problem: tuple[Tensor, Tensor], lam: float, gamma: float) -> None:
    found = solvers.exact(*problem, lam, gamma)
    assert torch.allclose(found, reference.exact(*problem, lam, gamma), atol=1e-12)
    found.requires_grad_()
    objective(found, *problem, lam, gamma).backward()
    assert found.grad.abs().max() < 1e-10


@settings(max_examples=25, deadline=None)
@given(problem=problems(), lam=weights, gamma=weights, seed=st.integers(0, 1000))
def test_no_other_coefficients_have_a_lower_objective(
    problem: tuple[Tensor, Tensor], lam: float, gamma: float, seed: int
) -> None:
    found = solvers.exact(*problem, lam, gamma)
    step = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lowest = objective(found, *problem, lam, gamma)
    for size in (1e-4, 1e-2, 1.0):
        assert objective(found + size * step, *problem, lam, gamma) > lowest


@settings(max_examples=25, deadline=None)
@given(problem=problems(), lam=weights, gamma=st.floats(0, 2), steps=st.integers(0, 40), lr=st.floats(1e-4, 1e-2))
def test_budgeted_is_the_adam_loop_of_autograd(
    problem: tuple[Tensor, Tensor], lam: float, gamma: float, steps: int, lr: float
) -> None:
    found = solvers.budgeted(*problem, lam, gamma, steps, lr)
    assert torch.allclose(found, reference.adam(*problem, lam, gamma, steps, lr), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), lam=weights, gamma=weights, delta=st.floats(0, 0.3))
def test_soft_threshold_is_the_clipped_model(
    problem: tuple[Tensor, Tensor], lam: float, gamma: float, delta: float
) -> None:
    found = solvers.soft_threshold(*problem, lam, gamma, delta)
    assert torch.allclose(found, reference.clipped(*problem, lam, gamma, delta), atol=1e-12)


def test_soft_threshold_runs_from_the_projection_to_the_minimiser() -> None:
    projection, overlap = problem(6, 10, 4, 8, torch.Generator().manual_seed(0))
    minimiser = solvers.exact(projection, overlap, 5.0 * 4 / 8, 0.5)
    assert torch.allclose(solvers.soft_threshold(projection, overlap, 5.0, 0.5, 0.0), projection)
    assert torch.allclose(solvers.soft_threshold(projection, overlap, 5.0, 0.5, 1e3), minimiser)


def test_budgeted_starts_at_the_projection_and_ends_at_the_entry_averaged_minimiser() -> None:
    projection, overlap = problem(6, 10, 4, 8, torch.Generator().manual_seed(0), scale=0.02)
    assert torch.equal(solvers.budgeted(projection, overlap, 5.0, 0.5, 0), projection)
    minimiser = solvers.exact(projection, overlap, 5.0 * 4 / 8, 0.5)
    late = solvers.budgeted(projection, overlap, 5.0, 0.5, 3000)
    assert (late - minimiser).norm() < 1e-3 * minimiser.norm()
    assert (late - solvers.exact(projection, overlap, 5.0, 0.5)).norm() > 1e-2 * minimiser.norm()


@pytest.mark.parametrize(("lam", "gamma"), [(50.0, 0.5), (5.0, 0.5)])
@pytest.mark.parametrize(("rank", "retain_rank"), [(5, 16), (16, 16), (64, 64)])
def test_the_iterate_is_nearer_to_its_model_than_to_projection_and_minimiser(
    lam: float, gamma: float, rank: int, retain_rank: int
) -> None:
    """In the paper's regime: entries of rms 0.02, a few far above δ = lr · T, and overlapping spans."""
    generator = torch.Generator().manual_seed(rank)
    projection, overlap = problem(128, 256, rank, retain_rank, generator, scale=0.02)
    overlap = overlap * 0.8 / torch.linalg.matrix_norm(overlap, 2)
    large = torch.rand(projection.shape, generator=generator) < 0.003
    projection = projection + 0.4 * large * projection.sign()
    assert 0.01 < projection.square().mean().sqrt() < 0.04
    iterate = solvers.budgeted(projection, overlap, lam, gamma, steps=100, lr=1e-3)
    model = solvers.soft_threshold(projection, overlap, lam, gamma, delta=100 * 1e-3)
    minimiser = solvers.exact(projection, overlap, lam * rank / retain_rank, gamma)
    distance = {
        name: ((iterate - other).norm() / iterate.norm()).item()
        for name, other in {"model": model, "minimiser": minimiser, "projection": projection}.items()
    }
    assert distance["model"] < distance["minimiser"]
    assert distance["model"] < distance["projection"]


@pytest.mark.parametrize("solver", [solvers.exact, solvers.budgeted, solvers.soft_threshold])
def test_groups_are_solved_side_by_side(solver: object) -> None:
    generator = torch.Generator().manual_seed(1)
    one, two = (problem(5, 9, 3, 4, generator) for _ in range(2))
    both = solver(torch.stack([one[0], two[0]]), torch.stack([one[1], two[1]]), 10.0, 0.5)
    assert torch.allclose(both[0], solver(*one, 10.0, 0.5), atol=1e-12)
    assert torch.allclose(both[1], solver(*two, 10.0, 0.5), atol=1e-12)


@pytest.mark.parametrize("solver", [solvers.exact, solvers.budgeted, solvers.soft_threshold])
def test_without_a_retain_span_lambda_has_no_effect(solver: object) -> None:
    projection, overlap = problem(5, 9, 3, 0, torch.Generator().manual_seed(1))
    assert torch.equal(solver(projection, overlap, 100.0, 0.5), solver(projection, overlap, 0.0, 0.5))


@pytest.mark.parametrize("solver", [solvers.exact, solvers.budgeted, solvers.soft_threshold])
def test_nothing_to_pay_keeps_the_projection_and_the_arguments(solver: object) -> None:
    projection, overlap = problem(5, 9, 3, 4, torch.Generator().manual_seed(1))
    before = projection.clone(), overlap.clone()
    assert torch.allclose(solver(projection, overlap, 0.0, 0.0), projection)
    solver(projection, overlap, 10.0, 0.5)
    assert torch.equal(projection, before[0])
    assert torch.equal(overlap, before[1])
