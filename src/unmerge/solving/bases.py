"""Forget directions of one layer (or one group of it), as orthonormal columns in float64.

Scatters may be in float32; sums over d are large, so eigenvectors are checked and solves are in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.linalg.eigen import top_eigenpairs
from unmerge.linalg.orthonormal import NOISE, orthonormal_columns, orthonormal_rows


def pca(scatter: Tensor, rank: int, start: Tensor | None = None) -> Tensor:
    """The leading eigenvectors of a centred scatter (Algorithm 2), at most as many as have variance.

    start: the leading eigenvectors of a similar scatter, where they are known.
    """
    values, vectors = top_eigenpairs(scatter, rank, start=start)
    if len(values) == 0 or values[0] <= 0:
        return vectors[:, :0]
    return vectors[:, values > NOISE[scatter.dtype] * values[0]]


def deflated_pca(forget_scatter: Tensor, retain_basis: Tensor, rank: int) -> Tensor:
    """The leading eigenvectors of the forget scatter once the retain directions are projected out of it."""
    if retain_basis.shape[1] >= forget_scatter.shape[-1]:
        return retain_basis[:, :0]
    scatter = forget_scatter.double()
    rest = scatter - retain_basis @ (retain_basis.mT @ scatter)
    rest = rest - (rest @ retain_basis) @ retain_basis.mT
    values, vectors = top_eigenpairs(rest, rank)
    top = top_eigenpairs(scatter, 1)[0]
    found = vectors[:, values > NOISE[forget_scatter.dtype] * top]
    # What rounding left of the retain directions.
    return orthonormal_rows((found - retain_basis @ (retain_basis.mT @ found)).mT)


def cav(forget_scatters: Sequence[Tensor], retain_scatter: Tensor, shifts: Tensor, ridge: float) -> Tensor:
    """One ridge probe a cluster against the retain pool, orthogonalised in order (Algorithm 3).

    forget_scatters: S_j of each cluster about the centre c of the forget pool; shifts: rows n_j (m_j − c).
    w_j = (S_j + S_R + μI)⁻¹ n_j (m_j − c), which is the paper's regression on ±1 labels without its rows.
    """
    probes = [
        factor_solve(ridged_factor(scatter.double() + retain_scatter.double(), ridge), shift.unsqueeze(-1))[:, 0]
        for scatter, shift in zip(forget_scatters, shifts, strict=True)
    ]
    return (
        orthonormal_rows(torch.stack(probes)) if probes else retain_scatter.new_zeros(len(retain_scatter), 0).double()
    )


def lda(factor: Tensor, shifts: Tensor) -> Tensor:
    """orth(Σ⁻¹ (m_c − m_R)) with one covariance for all classes, given by its factor (`ridged_factor`)."""
    return orthonormal_rows(factor_solve(factor, shifts.mT).mT)


def contrastive(forget: Tensor, factor: Tensor, rank: int, noise: float) -> Tensor:
    """Directions of most forget variance per retain variance: Σ_F v = ρ (Σ_R + μI) v, the forget one about m_R.

    factor: L of LLᵀ = Σ_R + μI (`ridged_factor`); noise: see `_contrasted`.
    """
    return orthonormal_columns(_contrasted(forget, factor, rank, noise)[0])


def wiener(forget: Tensor, factor: Tensor, rank: int, lam: float, noise: float) -> tuple[Tensor, Tensor]:
    """The edit τ lift Qᵀ that takes most of τx from the forget inputs at the least change for the others.

    It minimises E_F‖τx − Δx‖² + λ (E_R‖Δx‖² + μ‖Δ‖²) over Δ: τ Σ_F (Σ_F + λ(Σ_R + μI))⁻¹, of which the `rank` leading
    directions are kept; in each the gain is ρ / (ρ + λ). Q is orthonormal, `lift` has its shape.
    """
    if rank >= len(factor):  # nothing is left out, so no direction need be known
        system, failed = torch.linalg.cholesky_ex(torch.addmm(forget, factor, factor.mT, alpha=lam))
        if not failed:
            return torch.eye(len(factor)).to(forget), torch.cholesky_solve(forget, system).mT
    found, values, whitened = _contrasted(forget, factor, rank, noise)
    basis = orthonormal_columns(found)
    return basis, factor @ (whitened * (values / (values + lam)) @ (found.mT @ basis))


def _contrasted(forget: Tensor, factor: Tensor, rank: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """The leading v and ρ of Σ_F v = ρ LLᵀ v, and the eigenvectors Lᵀv of L⁻¹ Σ_F L⁻ᵀ, all in float64.

    noise: see `Pools.noise`.
    """

    def product(block: Tensor) -> Tensor:
        spread = torch.linalg.solve_triangular(factor.mT, block, upper=True)
        return torch.linalg.solve_triangular(factor, forget @ spread, upper=False)

    values, vectors = top_eigenpairs(product, rank, like=forget)
    vectors, values = vectors[:, values > 0], values[values > 0]
    found = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)
    # Whitening makes much of a direction without variance (that of ones behind a LayerNorm): what the sums of squares
    # there cancel to is rounding, which another order of the same batches would change.
    energy, terms = (found * (forget @ found)).sum(0), (found.square() * forget.diagonal().unsqueeze(1)).sum(0)
    kept = energy > noise * terms
    return found[:, kept], values[kept], vectors[:, kept]


def ridged_factor(matrix: Tensor, ridge: float, column: Tensor | None = None) -> Tensor:
    """The Cholesky factor L of matrix + ridge · (mean eigenvalue) · I, and of c cᵀ more where a column c is given."""
    system = matrix.to(torch.float64, copy=True)
    scale = system.diagonal().mean()
    # Without any ridge a rank-deficient scatter has no factor; rounding needs this much.
    system.diagonal().add_(max(ridge, 1e-10) * scale.clamp_min(torch.finfo(torch.float64).tiny))
    if column is not None:
        system.addr_(column, column)
    try:
        return torch.linalg.cholesky(system)
    except torch.linalg.LinAlgError as error:
        if not matrix.isfinite().all():
            raise StatisticsError("these statistics are of no data: a scatter holds NaN or infinite values.") from error
        raise StatisticsError(
            f"a layer's inputs vary in too few directions to be inverted ({error}). Raise the recipe's ridge={ridge}."
        ) from error


def factor_solve(factor: Tensor, right: Tensor) -> Tensor:
    return torch.cholesky_solve(right.double(), factor)
