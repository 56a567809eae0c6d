"""The paper's statements hold for the bases and coefficients that the library computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import networks
import reference
import unmerge
from networks import request
from unmerge.linalg.eigen import top_eigenpairs
from unmerge.solving import bases, solvers

SLACK = 1 + 1e-9
weights = st.floats(0, 50)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Forget rows, retain rows, a task vector and a rank below the number of features."""
    features, units = draw(st.integers(3, 10)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    forget = normal(draw(st.integers(2, 20)), features) @ normal(features, features) + normal(features)
    retain = normal(draw(st.integers(2, 30)), features) @ normal(features, features) + normal(features)
    return forget, retain, normal(units, features), draw(st.integers(1, features - 1))


def second_moment(rows: Tensor) -> Tensor:
    """Σ = XᵀX / N, as in the paper's theory."""
    return rows.T @ rows / len(rows)


def response(matrix: Tensor, rows: Tensor) -> Tensor:
    """The mean of ‖A x‖² over the rows."""
    return (rows @ matrix.T).square().sum(1).mean()


def forget_task(forget_basis: Tensor, retain_basis: Tensor, task: Tensor, lam: float, gamma: float) -> Tensor:
    """τ_F = B* Q_Fᵀ."""
    return solvers.exact(task @ forget_basis, forget_basis.T @ retain_basis, lam, gamma) @ forget_basis.T


@settings(max_examples=40, deadline=None)
@given(layer=layers(), lam=weights, gamma=weights, alpha=st.floats(0.1, 3))
def test_proposition_1_bounds_forget_leakage_and_retain_damage(
    layer: tuple[Tensor, Tensor, Tensor, int], lam: float, gamma: float, alpha: float
) -> None:
    forget, retain, task, rank = layer
    moments = second_moment(forget), second_moment(retain)
    forget_basis, retain_basis = (bases.pca(moment, rank) for moment in moments)
    nu, mu = (torch.linalg.eigvalsh(moment).flip(0).clamp_min(0) for moment in moments)
    task_f = forget_task(forget_basis, retain_basis, task, lam, gamma)
    left = task - alpha * task_f
    leakage = nu[0] * (left @ forget_basis).square().sum() + nu[rank] * left.square().sum()
    damage = mu[0] * (task_f @ retain_basis).square().sum() + mu[rank] * task_f.square().sum()
    assert response(left, forget) <= SLACK * leakage + 1e-12
    assert response(alpha * task_f, retain) <= SLACK * alpha**2 * damage + 1e-12


@settings(max_examples=40, deadline=None)
@given(layer=layers(), lam=weights, gamma=weights, steps=st.integers(1, 20))
def test_the_bounds_hold_for_the_budgeted_iterate(
    layer: tuple[Tensor, Tensor, Tensor, int], lam: float, gamma: float, steps: int
) -> None:
    forget, retain, task, rank = layer
    forget_basis, retain_basis = (bases.pca(second_moment(rows), rank) for rows in (forget, retain))
    mu = torch.linalg.eigvalsh(second_moment(retain)).flip(0).clamp_min(0)
    overlap = forget_basis.T @ retain_basis
    task_f = solvers.budgeted(task @ forget_basis, overlap, lam, gamma, steps, 0.05) @ forget_basis.T
    damage = mu[0] * (task_f @ retain_basis).square().sum() + mu[rank] * task_f.square().sum()
    assert response(task_f, retain) <= SLACK * damage + 1e-12


@settings(max_examples=40, deadline=None)
@given(layer=layers(), lam=weights, gamma=weights, alpha=st.floats(0.1, 3), classes=st.integers(1, 3))
def test_the_general_bound_holds_for_probes_that_are_no_eigenvectors(
    layer: tuple[Tensor, Tensor, Tensor, int], lam: float, gamma: float, alpha: float, classes: int
) -> None:
    forget, retain, task, rank = layer
    parts = forget.tensor_split(min(classes, len(forget)))
    factor = bases.ridged_factor(reference.covariance(torch.cat([forget, retain])), 1e-2)
    basis = bases.lda(factor, torch.stack([part.mean(0) - retain.mean(0) for part in parts]))
    task_f = forget_task(basis, bases.pca(second_moment(retain), rank), task, lam, gamma)
    left, moment = task - alpha * task_f, second_moment(forget)
    outside = torch.eye(len(moment), dtype=torch.float64) - basis @ basis.T
    largest = torch.linalg.eigvalsh(moment)[-1]
    tail = torch.linalg.matrix_norm(outside @ moment @ outside, 2)
    bound = 2 * largest * (left @ basis).square().sum() + 2 * tail * left.square().sum()
    assert response(left, forget) <= SLACK * bound + 1e-12


@settings(max_examples=40, deadline=None)
@given(layer=layers(), lam=weights, gamma=weights)
def test_corollary_1_the_minimiser_is_a_gain_along_each_principal_direction(
    layer: tuple[Tensor, Tensor, Tensor, int], lam: float, gamma: float
) -> None:
    forget, retain, task, rank = layer
    forget_basis, retain_basis = (bases.pca(second_moment(rows), rank) for rows in (forget, retain))
    projection, overlap = task @ forget_basis, forget_basis.T @ retain_basis
    minimiser = solvers.exact(projection, overlap, lam, gamma)
    left_vectors, cosines, _ = torch.linalg.svd(overlap)
    squared = torch.zeros(overlap.shape[0], dtype=torch.float64)
    squared[: len(cosines)] = cosines.square()
    assert cosines.max() <= SLACK
    gains = 1 / (1 + gamma + lam * squared)
    assert torch.allclose(minimiser, projection @ left_vectors @ torch.diag(gains) @ left_vectors.T, atol=1e-9)
    amounts = (projection @ left_vectors).square().sum(0)
    retained = (minimiser @ overlap).square().sum()
    assert torch.allclose(retained, (gains.square() * squared * amounts).sum(), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(layer=layers(), seed=st.integers(0, 999))
def test_lemma_1_the_tail_eigenvalues_bound_what_the_basis_misses(
    layer: tuple[Tensor, Tensor, Tensor, int], seed: int
) -> None:
    forget, _, task, rank = layer
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(len(task), len(forget), generator=generator, dtype=torch.float64)
    spanned = mixing @ forget
    moment = second_moment(forget)
    basis = bases.pca(moment, rank)
    missed = spanned - spanned @ basis @ basis.T
    tail = moment.trace() - top_eigenpairs(moment, rank)[0].sum()
    bound = torch.linalg.matrix_norm(mixing, 2) ** 2 * len(forget) * tail
    assert missed.square().sum() <= SLACK * bound + 1e-9 * spanned.square().sum()


@pytest.mark.parametrize("basis", ["pca", "lda", "cav-class"])
def test_the_retain_bound_holds_for_a_fitted_layer_about_its_mean(basis: str) -> None:
    """As implemented: eigenvectors of the centred covariance, and an edit that acts on x − m_R."""
    model = networks.mlp((10, 6))
    forget, retain = request((10,), forgotten=(0, 1), kept=(2, 3, 4), each=20)
    recipe = unmerge.Recipe(basis=basis, rank=3, retain_rank=4, skip_layers=0, head="edit", mean="preserve")
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    layer, alpha = edit.layers["0"], 1.5
    before = model(retain[0])
    with edit.applied(model, alpha):
        moved = (model(retain[0]) - before).square().sum(1).mean()
    mu = torch.linalg.eigvalsh(reference.covariance(retain[0])).flip(0)
    task_f = layer.B @ layer.Q.T
    span = reference.pca_basis(retain[0], 4)
    bound = alpha**2 * (mu[0] * (task_f @ span).square().sum() + mu[4] * task_f.square().sum())
    assert 0 < moved <= SLACK * bound


def test_a_larger_lambda_leaks_less_into_the_retain_span() -> None:
    model = networks.mlp((10, 6))
    forget, retain = request((10,), forgotten=(0, 1), kept=(2, 3, 4), each=20)
    damage = {}
    for lam in (0.0, 1.0, 10.0, 100.0):
        recipe = unmerge.Recipe(basis="pca", rank=6, retain_rank=6, lam=lam, skip_layers=0, head="edit", mean="free")
        layer = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe).layers["0"]
        span = reference.pca_basis(retain[0], 6)
        damage[lam] = (layer.B @ layer.Q.T @ span).norm().item()
    assert damage[0.0] > damage[1.0] > damage[10.0] > damage[100.0]
