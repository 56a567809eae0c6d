"""Coefficients B of the edit B Qᵀ from the projection τ Q and the overlap Q_Fᵀ Q_R (eq. 2 in projected form).

Shapes: projection (..., out, k), overlap (..., k, retain rank), coefficients like the projection.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact(projection: Tensor, overlap: Tensor, lam: float, gamma: float) -> Tensor:
    """Minimiser of the projected objective (eq. 4): one k-by-k solve, the same for every output unit."""
    system = lam * overlap @ overlap.mT
    system.diagonal(dim1=-2, dim2=-1).add_(1 + gamma)
    return torch.linalg.solve(system, projection, left=False)


def budgeted(
    projection: Tensor, overlap: Tensor, lam: float, gamma: float, steps: int = 100, lr: float = 1e-3
) -> Tensor:
    """The iterate after a fixed number of Adam steps from the projection (phase 2 of Algorithm 1).

    As in the paper's code each term is averaged over its entries, so that the retain term weighs λ·k_F/k_R.
    """
    coefficients = projection.clone()
    optimizer = torch.optim.Adam([coefficients], lr=lr)
    gram = overlap @ overlap.mT
    units, rank = projection.shape[-2:]
    for _ in range(steps):
        pull = (coefficients - projection) + gamma * coefficients
        leak = _entry_averaged(lam, overlap) * coefficients @ gram
        coefficients.grad = 2 / (units * max(rank, 1)) * (pull + leak)
        optimizer.step()
    return coefficients


def soft_threshold(projection: Tensor, overlap: Tensor, lam: float, gamma: float, delta: float = 0.1) -> Tensor:
    """B* + S_δ(B₀ − B*) (eq. "clip"): the paper's closed-form model of the budgeted iterate."""
    minimiser = exact(projection, overlap, _entry_averaged(lam, overlap), gamma)
    return minimiser + torch.nn.functional.softshrink(projection - minimiser, delta)


def _entry_averaged(lam: float, overlap: Tensor) -> float:
    rank, retain_rank = overlap.shape[-2:]
    return lam * rank / retain_rank if retain_rank else 0.0
