"""Sums of second order over rows y about a pivot, by name: `gram` (Σyyᵀ), or `sketch` (Σyyᵀ Ω) and `diagonal` (Σy²)."""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.linalg.products import full_precision
from unmerge.linalg.signs import signs

Sums = dict[str, Tensor]


def combined(one: Sums, other: Sums, sign: int) -> Sums:
    """one + sign · other, of sums about the same pivot."""
    if {name: part.shape for name, part in one.items()} != {name: part.shape for name, part in other.items()}:
        raise StatisticsError("moments and sketches, or sketches of different sizes, do not combine.")
    return {name: torch.add(part, other[name], alpha=sign) for name, part in one.items()}


def add_step_(sums: Sums, n: float, total: Tensor, step: Tensor, sign: int) -> None:
    """Add (or take away) what the sums of n rows, Σy = total, gain about a pivot that lies `step` below theirs."""
    # About the pivot p − s a sum Σyyᵀ becomes Σ(y + s)(y + s)ᵀ = Σyyᵀ + wsᵀ + swᵀ with w = Σy + ns/2.
    half = total + n / 2 * step
    if "gram" in sums:
        gram = sums["gram"]
        left, right = (vector.to(gram.dtype).unsqueeze(-1) for vector in (half, step))
        gram.addcmul_(left, right.mT, value=sign).addcmul_(right, left.mT, value=sign)
        return
    sketch = sums["sketch"]
    features, size = sketch.shape
    # In the type of rows first, in which they may be held; sums that are still counted can be wider.
    columns = signs(features, size, sketch.new_empty(0, dtype=torch.float32)).to(sketch.dtype)
    pair = torch.stack([half, step]).to(sketch.dtype)
    with full_precision():
        sketch.addmm_(pair.mT, (pair @ columns).flip(0), alpha=sign)
    sums["diagonal"].add_(2 * half * step, alpha=sign)


def narrowed(sums: Sums, kind: torch.dtype) -> Sums:
    """The sums with their matrix in another type; a diagonal is small and stays as it is."""
    return {name: part if name == "diagonal" else part.to(kind) for name, part in sums.items()}


def matrix_of(sums: Sums) -> Tensor:
    """The Gram, or the sketch that stands for it."""
    return sums["gram"] if "gram" in sums else sums["sketch"]


def squares(sums: Sums) -> Tensor:
    """Σy² of each feature."""
    return sums["diagonal"] if "diagonal" in sums else sums["gram"].diagonal(dim1=-2, dim2=-1)


def witness(total: Tensor, diagonal: Tensor, kept: torch.dtype) -> Tensor:
    """A number that is finite where all sums are, as a tensor, so that asking for it needs no wait."""
    return torch.linalg.vector_norm(total, torch.inf) + torch.linalg.vector_norm(diagonal.to(kept), torch.inf)


def add_outer(matrix: Tensor, vector: Tensor, sign: int) -> Tensor:
    """matrix ± v vᵀ, formed in the matrix's type."""
    column = vector.to(matrix.dtype).unsqueeze(-1)
    return torch.addcmul(matrix, column, column.mT, value=sign)


def fill_lower_(gram: Tensor) -> None:
    """Both triangles of a Gram from the upper one."""
    gram.triu_()
    gram += gram.triu(1).mT
