"""The leading eigenvectors hold the energy that a full decomposition gives them."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmerge.linalg.eigen import captured, may_be_dense, swept, top_eigenpairs

SIZE = 1200  # above 1024, where a full decomposition is no longer made
RANK = 24


@functools.cache
def rotation(size: int = SIZE) -> Tensor:
    """A random orthogonal matrix."""
    generator = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def with_spectrum(values: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues in random directions."""
    basis = rotation(len(values))
    matrix = (basis * values) @ basis.T
    return (matrix + matrix.T) / 2


def spiked(height: float, spikes: int = RANK) -> Tensor:
    """A flat spectrum with some eigenvalues a little above the rest."""
    values = torch.ones(SIZE, dtype=torch.float64)
    values[:spikes] += height
    return values


def energy_share(matrix: Tensor, vectors: Tensor, spectrum: Tensor) -> float:
    """The captured energy as a share of what the leading eigenvectors hold."""
    best = spectrum.sort(descending=True).values[: vectors.shape[1]].sum()
    return (captured(matrix.double(), vectors) / best).item()


def is_orthonormal(vectors: Tensor, tolerance: float = 1e-10) -> bool:
    """Whether the columns are orthonormal."""
    identity = torch.eye(vectors.shape[1], dtype=torch.float64)
    return bool((vectors.T @ vectors - identity).abs().max() < tolerance)


class Counted:
    """Products with a matrix, and how many were asked for."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.products = matrix, 0

    def __call__(self, block: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ block


STEPS = torch.arange(SIZE, dtype=torch.float64)
SPECTRA = {
    "exponential": torch.exp(-STEPS / 40),
    "power law": (1 + STEPS) ** -1.0,
    "slow power law": (1 + STEPS) ** -0.3,
    "linear": 1 - STEPS / (2 * SIZE),
    "step": torch.where(STEPS < 10, 100.0, 1.0).double(),
    "constant": torch.ones(SIZE, dtype=torch.float64),
    "nearly constant": 1 + 0.002 * (1 - STEPS / SIZE),
    "noise": 1 + 0.4 * torch.cos(torch.pi * STEPS / SIZE),
    "spikes of 50 %": spiked(0.5),
    "spikes of 2 %": spiked(0.02),
    "spikes of 0.5 %": spiked(0.005),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SPECTRA)
def test_large_matrices_keep_the_energy_of_a_full_decomposition(name: str, dtype: torch.dtype) -> None:
    matrix = with_spectrum(SPECTRA[name]).to(dtype)
    values, vectors = top_eigenpairs(matrix, RANK)
    assert vectors.shape == (SIZE, RANK)
    assert values.dtype == vectors.dtype == torch.float64
    assert is_orthonormal(vectors)
    assert energy_share(matrix, vectors, SPECTRA[name]) > 0.9998
    assert (values.diff() <= 1e-6 * values[0]).all()
    assert torch.allclose(values.sum(), captured(matrix.double(), vectors), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_way_for_a_gpu_finds_the_energy_or_gives_up(name: str, dtype: torch.dtype) -> None:
    matrix = with_spectrum(SPECTRA[name]).to(dtype)
    found = swept(matrix.__matmul__, RANK, matrix)
    assert (found is not None) == (name in ("exponential", "power law"))
    if found is not None:
        assert is_orthonormal(found[1])
        assert energy_share(matrix, found[1], SPECTRA[name]) > 0.9998


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SPECTRA)
def test_a_gpu_keeps_the_energy_of_every_spectrum(name: str) -> None:
    matrix = with_spectrum(SPECTRA[name])
    vectors = top_eigenpairs(matrix.cuda(), RANK)[1].cpu()
    assert is_orthonormal(vectors)
    assert energy_share(matrix, vectors, SPECTRA[name]) > 0.9998


def test_a_plan_counts_all_eigenvectors_where_a_gpu_may_find_them() -> None:
    assert may_be_dense(2048, 16, "cuda")
    assert not may_be_dense(2049, 16, "cuda")
    assert not may_be_dense(4096, 16, "cpu")
    assert may_be_dense(4096, 1025, "cpu")


@pytest.mark.parametrize("height", [0.0005, 0.002, 0.004, 0.01])
@pytest.mark.parametrize("rank", [1, 8])
def test_directions_barely_above_a_flat_spectrum_are_not_missed(height: float, rank: int) -> None:
    """Iterates gain little energy a step there, which is no sign that they have found it."""
    spectrum = spiked(height, rank)
    matrix = with_spectrum(spectrum)
    vectors = top_eigenpairs(matrix, rank)[1]
    assert is_orthonormal(vectors)
    assert energy_share(matrix, vectors, spectrum) > 0.999


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), rank=st.integers(0, 45), seed=st.integers(0, 1000))
def test_small_matrices_are_solved_exactly(size: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size + 3, size, generator=generator, dtype=torch.float64)
    matrix = rows.T @ rows
    values, vectors = top_eigenpairs(matrix, rank)
    expected = torch.linalg.eigvalsh(matrix).flip(0)[:rank]
    assert vectors.shape == (size, min(rank, size))
    assert torch.allclose(values, expected, rtol=1e-9)
    assert torch.allclose(matrix @ vectors, vectors * values, atol=1e-9 * (1 + matrix.abs().max().item()))


@pytest.mark.parametrize("size", [300, SIZE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fewer_rows_than_features_give_their_span(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, size, generator=generator, dtype=torch.float64)
    matrix = (rows.T @ rows).to(dtype)
    values, vectors = top_eigenpairs(matrix, RANK)
    assert values.isfinite().all()
    assert is_orthonormal(vectors)
    assert torch.allclose(values[:10], torch.linalg.svdvals(rows) ** 2, rtol=1e-4)
    assert values[10:].abs().max() < 1e-6 * values[0]
    assert torch.allclose(rows @ vectors[:, :10] @ vectors[:, :10].T, rows, atol=1e-4)


@pytest.mark.parametrize("size", [60, SIZE])
def test_a_matrix_may_be_given_by_its_products(size: int) -> None:
    matrix = with_spectrum(torch.exp(-torch.arange(size, dtype=torch.float64) / 10))
    values, vectors = top_eigenpairs(matrix.__matmul__, 8, like=matrix)
    expected, others = top_eigenpairs(matrix, 8)
    assert torch.allclose(values, expected, rtol=1e-6)
    assert torch.allclose(vectors @ vectors.T, others @ others.T, atol=1e-4)


def test_a_zero_matrix_has_no_energy_and_no_trouble() -> None:
    for size in (20, SIZE):
        values, vectors = top_eigenpairs(torch.zeros(size, size), 5)
        assert values.abs().max() == 0
        assert is_orthonormal(vectors)


def test_the_result_is_the_same_every_time_and_draws_no_random_numbers() -> None:
    matrix = with_spectrum(SPECTRA["power law"])
    state = torch.random.get_rng_state()
    first, second = (top_eigenpairs(matrix, RANK)[1] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_matrix_is_left_as_it_was() -> None:
    for size in (30, SIZE):
        matrix = with_spectrum(torch.linspace(2, 1, size, dtype=torch.float64))
        before = matrix.clone()
        top_eigenpairs(matrix, 4)
        assert torch.equal(matrix, before)


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_a_start_from_a_similar_matrix_needs_fewer_products_and_keeps_the_energy(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    size, rank = 1400, 8
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -decay
    part = torch.randn(size, 40, generator=generator, dtype=torch.float64)
    rest = (rotation * values) @ rotation.mT
    whole = rest + 0.002 * values[0] / size * part @ part.mT
    cold, warm = Counted(rest), Counted(rest)
    start = top_eigenpairs(whole, rank + 4)[1]
    top_eigenpairs(cold, rank, like=rest)
    found = top_eigenpairs(warm, rank, like=rest, start=start)[1]
    assert warm.products < cold.products
    assert captured(rest, found) > 0.9999 * values[:rank].sum()


@pytest.mark.parametrize("name", SPECTRA)
def test_a_bound_on_the_steps_ends_flat_spectra_early_and_keeps_their_energy(name: str) -> None:
    matrix, most = with_spectrum(SPECTRA[name]), 11
    bounded, free = Counted(matrix), Counted(matrix)
    values, vectors = top_eigenpairs(bounded, RANK, like=matrix, most=most)
    top_eigenpairs(free, RANK, like=matrix)
    assert bounded.products <= min(2 * most, free.products)
    assert is_orthonormal(vectors)
    assert energy_share(matrix, vectors, SPECTRA[name]) > (0.998 if name in ("linear", "noise") else 0.9998)
    assert torch.allclose(values.sum(), captured(matrix, vectors), rtol=1e-9)


def test_two_seeds_leave_no_common_directions_where_all_are_alike() -> None:
    bases = [top_eigenpairs(torch.eye(SIZE), 8, most=3, seed=seed)[1] for seed in (0, 0, 1)]
    assert torch.equal(bases[0], bases[1])
    assert (bases[0].T @ bases[2]).norm(dim=1).mean() < 3 * (8 / SIZE) ** 0.5
