"""Forget directions: orthonormal, equal to the literal constructions, and none made of rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from unmerge.linalg.orthonormal import NOISE, orthonormal_rows
from unmerge.solving import bases
from unmerge.sums.moments import Moments

ridges = st.sampled_from([1e-4, 1e-2, 0.3])


def rows_of(count: int, features: int, seed: int, shift: float = 0.0) -> Tensor:
    """Correlated rows with a mean of their own."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator, dtype=torch.float64)
    values = torch.randn(count, features, generator=generator, dtype=torch.float64) @ mixing
    return values + shift * torch.randn(features, generator=generator, dtype=torch.float64)


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of some forgotten and of some retained classes."""
    features, seed = draw(st.integers(2, 9)), draw(st.integers(0, 10_000))
    counts = [draw(st.lists(st.integers(3, 15), min_size=2, max_size=4)) for _ in range(2)]
    return tuple(  # type: ignore[return-value]
        [rows_of(count, features, seed + 97 * side + place, 1.0) for place, count in enumerate(side_counts)]
        for side, side_counts in enumerate(counts)
    )


def projector(basis: Tensor) -> Tensor:
    """Q Qᵀ, which does not depend on the choice of the columns."""
    return basis @ basis.T


def is_orthonormal(basis: Tensor) -> bool:
    """Whether the columns are orthonormal in float64."""
    identity = torch.eye(basis.shape[1], dtype=torch.float64)
    return basis.dtype == torch.float64 and torch.allclose(basis.T @ basis, identity, atol=1e-10)


def places(classes: list[Tensor]) -> list[Tensor]:
    """Where the rows of each class stand when the classes are put one after another."""
    ends = torch.tensor([len(rows) for rows in classes]).cumsum(0).tolist()
    return [torch.arange(end - len(rows), end) for rows, end in zip(classes, ends, strict=True)]


# pca


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 30), features=st.integers(1, 12), rank=st.integers(1, 14), seed=st.integers(0, 999))
def test_pca_is_the_reference_and_has_no_more_columns_than_variance(
    count: int, features: int, rank: int, seed: int
) -> None:
    rows = rows_of(count, features, seed, 3.0)
    found, expected = bases.pca(Moments.of(rows).scatter, rank), reference.pca_basis(rows, rank)
    assert is_orthonormal(found)
    assert found.shape == expected.shape
    assert found.shape[1] == min(rank, features, count - 1)
    assert torch.allclose(projector(found), projector(expected), atol=1e-5)


@pytest.mark.parametrize("features", [200, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pca_of_few_rows_finds_their_span_and_nothing_in_the_rounding(features: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(20, features, generator=generator) + 2).to(dtype)
    found = bases.pca(Moments.of(rows).scatter, 64)
    assert found.shape == (features, 19)
    assert is_orthonormal(found)
    centred = rows.double() - rows.double().mean(0)
    assert torch.allclose(centred @ projector(found), centred, atol=1e-4)


def test_pca_of_equal_rows_is_empty() -> None:
    assert bases.pca(torch.zeros(5, 5), 3).shape == (5, 0)
    assert bases.pca(torch.eye(5), 0).shape == (5, 0)


# deflated pca


@settings(max_examples=20, deadline=None)
@given(features=st.integers(2, 10), deflate=st.integers(0, 8), rank=st.integers(1, 6), seed=st.integers(0, 999))
def test_deflated_pca_is_the_reference_and_orthogonal_to_the_retain_directions(
    features: int, deflate: int, rank: int, seed: int
) -> None:
    forget, retain = rows_of(25, features, seed), rows_of(30, features, seed + 5000)
    removed = bases.pca(Moments.of(retain).scatter, deflate)
    found = bases.deflated_pca(Moments.of(forget).scatter, removed, rank)
    assert is_orthonormal(found)
    assert found.shape[1] == min(rank, features - removed.shape[1])
    assert (removed.T @ found).abs().max() < 1e-10 if found.numel() and removed.numel() else True
    if found.shape[1]:
        expected = reference.deflated_basis(forget, retain, deflate, rank)
        assert torch.allclose(projector(found), projector(expected), atol=1e-6)


def test_deflating_everything_leaves_nothing() -> None:
    assert bases.deflated_pca(torch.eye(4), torch.eye(4, dtype=torch.float64), 2).shape == (4, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forget_inputs_inside_the_retain_directions_leave_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    span = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))[0][:, :3]
    rows = (torch.randn(40, 3, generator=generator, dtype=torch.float64) @ span.T).to(dtype)
    assert bases.deflated_pca(Moments.of(rows).scatter, span, 4).shape == (12, 0)


# cav


@settings(max_examples=25, deadline=None)
@given(pools=pools(), ridge=ridges, centering=st.sampled_from(["separate", "retain"]))
def test_cav_from_scatters_is_the_regression_on_rows(
    pools: tuple[list[Tensor], list[Tensor]], ridge: float, centering: str
) -> None:
    forget, retain = torch.cat(pools[0]), torch.cat(pools[1])
    centre = forget.mean(0) if centering == "separate" else retain.mean(0)
    parts = [Moments.of(rows) for rows in pools[0]]
    found = bases.cav(
        [part.scatter_about(centre) for part in parts],
        Moments.of(retain).scatter,
        torch.stack([part.n * (part.mean - centre) for part in parts]),
        ridge,
    )
    expected = reference.cav_basis(forget, places(pools[0]), retain, ridge, centering)
    assert is_orthonormal(found)
    assert found.shape == expected.shape
    assert torch.allclose((found.T @ expected).diagonal().abs(), torch.ones(found.shape[1]).double(), atol=1e-6)


def test_cav_without_clusters_is_empty() -> None:
    empty = torch.zeros(0, 4, dtype=torch.float64)
    assert bases.cav([], torch.eye(4, dtype=torch.float64), empty, 1e-2).shape == (4, 0)


# lda


@settings(max_examples=25, deadline=None)
@given(pools=pools(), ridge=ridges)
def test_lda_is_the_reference(pools: tuple[list[Tensor], list[Tensor]], ridge: float) -> None:
    forget, retain = torch.cat(pools[0]), torch.cat(pools[1])
    factor = bases.ridged_factor(Moments.of(torch.cat([forget, retain])).covariance, ridge)
    found = bases.lda(factor, torch.stack([rows.mean(0) - retain.mean(0) for rows in pools[0]]))
    expected = reference.lda_basis(forget, places(pools[0]), retain, ridge)
    assert is_orthonormal(found)
    assert found.shape == expected.shape
    assert torch.allclose(projector(found), projector(expected), atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(pools=pools(), ridge=ridges, scale=st.sampled_from([1e-3, 7.0, 1e4]))
def test_lda_does_not_depend_on_the_unit_of_the_inputs(
    pools: tuple[list[Tensor], list[Tensor]], ridge: float, scale: float
) -> None:
    found = []
    for unit in (1.0, scale):
        lost, kept = torch.cat(pools[0]) * unit, torch.cat(pools[1]) * unit
        factor = bases.ridged_factor(Moments.of(torch.cat([lost, kept])).covariance, ridge)
        found.append(bases.lda(factor, torch.stack([rows.mean(0) * unit - kept.mean(0) for rows in pools[0]])))
    assert torch.allclose(projector(found[0]), projector(found[1]), atol=1e-6)


# contrastive


def contrastive(forget: Moments, retain: Moments, rank: int, ridge: float) -> Tensor:
    """The basis of two pools."""
    factor = bases.ridged_factor(retain.scatter, ridge)
    return bases.contrastive(forget.about(retain.mean), factor, rank, NOISE[forget.kept])


@settings(max_examples=25, deadline=None)
@given(pools=pools(), ridge=ridges, rank=st.integers(1, 10))
def test_contrastive_is_the_reference(pools: tuple[list[Tensor], list[Tensor]], ridge: float, rank: int) -> None:
    forget, retain = Moments.of(torch.cat(pools[0])), Moments.of(torch.cat(pools[1]))
    found = contrastive(forget, retain, rank, ridge)
    expected = reference.contrastive_basis(torch.cat(pools[0]), torch.cat(pools[1]), rank, ridge)
    assert is_orthonormal(found)
    assert found.shape == expected.shape
    assert torch.allclose(projector(found), projector(expected), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(pools=pools(), ridge=ridges, seed=st.integers(0, 999))
def test_no_direction_has_more_forget_per_retain_variance_than_the_first(
    pools: tuple[list[Tensor], list[Tensor]], ridge: float, seed: int
) -> None:
    forget, retain = Moments.of(torch.cat(pools[0])), Moments.of(torch.cat(pools[1]))
    about = forget.scatter_about(retain.mean) / forget.n
    first = contrastive(forget, retain, 1, ridge)
    penalised = reference.ridged(retain.covariance, ridge)
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(len(about), 20, generator=generator, dtype=torch.float64)

    def ratio(directions: Tensor) -> Tensor:
        return (directions * (about @ directions)).sum(0) / (directions * (penalised @ directions)).sum(0)

    assert (ratio(others) <= ratio(first) * (1 + 1e-9)).all()


@pytest.mark.parametrize("order", [1, -1])
def test_contrastive_makes_no_direction_of_what_float32_sums_leave_behind_a_layer_norm(order: int) -> None:
    """Its outputs sum to zero: their variance along (1, ..., 1) is rounding, which the order of the batches changes."""
    generator = torch.Generator().manual_seed(0)
    lost, kept = (torch.nn.functional.layer_norm(torch.randn(40, 36, 8, generator=generator), (8,)) for _ in range(2))
    lost = torch.nn.functional.layer_norm(lost + torch.arange(8) / 4, (8,))
    forget, retain = Moments(), Moments()
    for moments, batches in ((forget, lost), (retain, kept)):
        for batch in batches.flip(0) if order < 0 else batches:
            moments.update(batch)
    found = contrastive(forget, retain, 16, 1e-2)
    exact = [Moments.of(rows.double().flatten(0, 1)) for rows in (lost, kept)]
    expected = contrastive(*exact, 16, 1e-2)
    assert expected.shape == (8, 7)
    assert found.shape == (8, 7)
    assert torch.allclose(projector(found), projector(expected), atol=1e-4)


def test_contrastive_of_wide_layers_holds_the_ratio_of_a_full_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    decay = (1 + torch.arange(1100)) ** -0.5
    forget, retain = (torch.randn(count, 1100, generator=generator) * decay for count in (300, 700))
    lost, kept = Moments.of(forget), Moments.of(retain)
    about = (lost.scatter_about(kept.mean) / lost.n).double()
    found = contrastive(lost, kept, 8, 1e-2)
    assert is_orthonormal(found)
    inverse = torch.linalg.inv(bases.ridged_factor(kept.covariance, 1e-2))
    best = torch.linalg.eigvalsh(inverse @ about @ inverse.T)[-8:].sum()
    penalised = reference.ridged(kept.covariance.double(), 1e-2)
    held = torch.linalg.solve(found.T @ penalised @ found, found.T @ about @ found).trace()
    assert held > 0.9999 * best


# wiener


@settings(max_examples=25, deadline=None)
@given(pools=pools(), ridge=ridges, lam=st.sampled_from([0.1, 1.0, 30.0]), rank=st.integers(1, 10))
def test_wiener_is_the_reference_at_any_rank(
    pools: tuple[list[Tensor], list[Tensor]], ridge: float, lam: float, rank: int
) -> None:
    forget, retain = (torch.cat(side) for side in pools)
    factor = bases.ridged_factor(reference.covariance(retain), ridge, retain.mean(0))
    basis, lift = bases.wiener(forget.T @ forget / len(forget), factor, rank, lam, 1e-12)
    task_vector = torch.eye(forget.shape[1], dtype=torch.float64)
    expected, _ = reference.wiener_task(forget, retain, rank, ridge, lam, task_vector)
    assert is_orthonormal(basis)
    assert torch.allclose(lift @ basis.T, expected, atol=1e-7 * expected.abs().max().item())


@settings(max_examples=25, deadline=None)
@given(pools=pools(), lam=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 999))
def test_no_other_edit_forgets_as_much_at_less_change_than_wiener(
    pools: tuple[list[Tensor], list[Tensor]], lam: float, seed: int
) -> None:
    forget, retain = (torch.cat(side) for side in pools)
    moments = [rows.T @ rows / len(rows) for rows in (forget, retain)]
    generator = torch.Generator().manual_seed(seed)
    task_vector, other = torch.randn(2, 4, forget.shape[1], generator=generator, dtype=torch.float64)

    def cost(edit: Tensor) -> Tensor:
        left, changed = forget @ (task_vector - edit).T, retain @ edit.T
        return left.square().sum() / len(forget) + lam * changed.square().sum() / len(retain)

    basis, lift = bases.wiener(moments[0], bases.ridged_factor(moments[1], 1e-9), forget.shape[1], lam, 1e-12)
    found = task_vector @ lift @ basis.T
    assert all(cost(found) <= cost(found + step * other) * (1 + 1e-6) for step in (-1e-1, -1e-3, 1e-3, 1e-1))


# What they are made of


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 6), features=st.integers(1, 6), seed=st.integers(0, 999), doubled=st.booleans())
def test_orthonormal_keeps_order_and_span_and_drops_what_depends(
    count: int, features: int, seed: int, doubled: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    probes = torch.randn(count, features, generator=generator, dtype=torch.float64)
    if doubled and count:
        probes = torch.cat([probes[:1], 1e-3 * probes[:1], torch.zeros(1, features).double(), probes])
    found = orthonormal_rows(probes)
    assert is_orthonormal(found)
    assert found.shape == (features, min(count, features))
    assert torch.allclose(probes @ projector(found), probes, atol=1e-9)
    if count:
        cosine = found[:, 0] @ probes[0] / probes[0].norm()
        assert cosine > 1 - 1e-9


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 12), features=st.integers(1, 8), ridge=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]))
def test_the_ridge_is_relative_to_the_mean_eigenvalue(count: int, features: int, ridge: float) -> None:
    rows = rows_of(count, features, count)
    matrix = rows.T @ rows
    before = matrix.clone()
    factor = bases.ridged_factor(matrix, ridge)
    assert torch.equal(matrix, before)
    assert torch.equal(factor, factor.tril())
    expected = reference.ridged(matrix, ridge)
    assert torch.allclose(factor @ factor.T, expected, rtol=1e-6, atol=1e-8 * matrix.abs().max().item())
