"""How a forget basis lies to the retain inputs of a layer: overlap, angles, captured variance, bounds.

Bases have orthonormal columns, scatters and second moments are symmetric; everything is per layer or per group of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.linalg.eigen import captured, top_eigenpairs


def overlaps(forget_basis: Tensor, retain_basis: Tensor) -> Tensor:
    """‖P_R q_i‖ of every forget direction: 0 private, 1 inside the retain span."""
    return (forget_basis.mT @ retain_basis).norm(dim=1).clamp_max(1)


def cosines(forget_basis: Tensor, retain_basis: Tensor) -> Tensor:
    """Cosines of the principal angles between the two spans (the singular values of C), largest first."""
    return torch.linalg.svdvals(forget_basis.mT @ retain_basis).clamp(0, 1)


def gains(angle_cosines: Tensor, lam: float, gamma: float) -> Tensor:
    """What the exact solver keeps along each principal direction (Corollary 1): 1 / (1 + γ + λσ²)."""
    return 1 / (1 + gamma + lam * angle_cosines.square())


def captured_share(scatter: Tensor, basis: Tensor) -> Tensor:
    """The share of the variance that a basis holds (fvar)."""
    return captured(scatter, basis) / scatter.double().diagonal().sum().clamp_min(torch.finfo(torch.float64).tiny)


def effective_rank(scatter: Tensor) -> Tensor:
    """tr(Σ)² / ‖Σ‖²: how many directions share the variance, 1 when one has it all."""
    trace = scatter.diagonal().double().sum()
    return trace.square() / scatter.double().square().sum().clamp_min(torch.finfo(torch.float64).tiny)


def response(matrix: Tensor, second_moment: Tensor) -> Tensor:
    """E‖Ax‖² over inputs with this second moment, exactly."""
    return ((matrix @ second_moment) * matrix).sum()


def response_bound(matrix: Tensor, second_moment: Tensor, basis: Tensor, *, is_eigenbasis: bool = False) -> Tensor:
    """An upper bound of E‖Ax‖² by what lies inside and outside the span of a basis (Proposition 1).

    With the leading eigenvectors as basis: ν₁‖AP‖² + ν₍k+1₎‖A‖². With any other (the remark on bases that are not
    eigenbases) both terms count twice, and the largest variance outside the span stands for ν₍k+1₎.
    """
    largest = top_eigenpairs(second_moment, 1)[0].sum()

    def outside(block: Tensor) -> Tensor:
        block = block - basis.to(block.dtype) @ (basis.mT.to(block.dtype) @ block)
        image = second_moment.to(block.dtype) @ block
        return image - basis.to(block.dtype) @ (basis.mT.to(block.dtype) @ image)

    left = top_eigenpairs(outside, 1, like=second_moment)[0].sum().clamp_min(0)
    times = 1 if is_eigenbasis else 2
    return times * (largest * (matrix @ basis).square().sum() + left * matrix.square().sum())
