"""Orthonormal columns: the way for a GPU gives what the one for a CPU gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from unmerge.linalg.orthonormal import orthonormal_columns, orthonormal_rows, spanning, thin_qr

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def columns_of(size: int, count: int, seed: int, condition: float = 1.0) -> Tensor:
    """Columns whose sizes fall to 1 / condition."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(size, count, generator=generator, dtype=torch.float64)
    return columns * torch.logspace(0, -torch.tensor(condition).log10().item(), count, dtype=torch.float64)


def deviation(basis: Tensor) -> float:
    """How far the columns are from orthonormal."""
    identity = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
    return (basis.mT @ basis - identity).abs().max().item() if basis.numel() else 0.0


@devices
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_columns_become_orthonormal_and_keep_their_span(device: str, condition: float) -> None:
    columns = columns_of(200, 12, 0, condition).to(device)
    basis = orthonormal_columns(columns)
    assert deviation(basis) < 1e-9
    scaled = columns / columns.norm(dim=0)
    assert torch.allclose(basis @ (basis.mT @ scaled), scaled, atol=1e-8)


@devices
def test_a_thin_factorisation_gives_back_dependent_columns(device: str) -> None:
    columns = columns_of(50, 4, 1).to(device)
    columns = torch.cat([columns, columns[:, :2]], dim=1)
    basis, upper = thin_qr(columns)
    assert deviation(basis) < 1e-12
    assert torch.allclose(basis @ upper, columns)


@devices
@settings(max_examples=20, deadline=None)
@given(size=st.integers(5, 40), count=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_span_of_dependent_columns_has_their_rank(device: str, size: int, count: int, seed: int) -> None:
    columns = columns_of(size, count, seed).to(device)
    doubled = torch.cat([columns, columns @ torch.ones(count, 2, dtype=torch.float64, device=device)], dim=1)
    basis = spanning(doubled, at_least=torch.tensor(0.0, device=device))
    assert basis.shape == (size, count)
    assert deviation(basis) < 1e-9
    assert torch.allclose(basis @ (basis.mT @ columns), columns, atol=1e-7)


def test_what_is_smaller_than_asked_for_spans_nothing() -> None:
    assert spanning(1e-3 * columns_of(10, 2, 0), at_least=torch.tensor(1.0)).shape == (10, 0)


def test_rows_that_earlier_ones_explain_are_dropped() -> None:
    rows = columns_of(10, 3, 2).mT
    found = orthonormal_rows(torch.stack([rows[0], 2 * rows[0], rows[1], rows[0] + rows[1], rows[2]]))
    assert found.shape == (10, 3)
    assert deviation(found) < 1e-12


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 6), repeated=st.booleans(), seed=st.integers(0, 999))
def test_rows_become_what_gram_schmidt_makes_of_them(count: int, repeated: bool, seed: int) -> None:
    rows = columns_of(9, count, seed, 1e4).mT
    if repeated and count:
        rows = torch.cat([rows[:1], -3 * rows])
    expected = reference.gram_schmidt(list(rows), 9)
    assert torch.allclose(orthonormal_rows(rows), expected, atol=1e-9)
