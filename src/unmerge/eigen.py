"""The leading eigenvectors of a symmetric matrix: exact when it is small, iterated and checked when it is large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmerge.moments import full_precision

EXACT_UP_TO = 1024
_TOLERANCE = 1e-6  # relative change of the captured energy at which the iteration stops
_ITERATIONS = 60

Product = Callable[[Tensor], Tensor]


def top_eigenpairs(matrix: Tensor | Product, rank: int, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues, descending, and their eigenvectors (d, rank), both float64.

    The matrix may be given as a product with (d, k) blocks; `like` is then a (d, d) tensor of its device and type.
    """
    multiply: Product = matrix.__matmul__ if isinstance(matrix, Tensor) else matrix
    like = matrix if isinstance(matrix, Tensor) else like
    assert like is not None
    size = like.shape[-1]
    rank = min(rank, size)
    if rank == 0:
        return like.new_zeros(0, dtype=torch.float64), like.new_zeros(size, 0, dtype=torch.float64)
    with full_precision():
        if size > EXACT_UP_TO and 4 * rank <= size:
            found = _iterated(multiply, rank, like)
            if found is not None:
                return found
        if not isinstance(matrix, Tensor):
            matrix = multiply(torch.eye(size, dtype=like.dtype, device=like.device))
        symmetric = matrix.double()
        values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
        return values[-rank:].flip(0), vectors[:, -rank:].flip(1)


def captured(matrix: Tensor, basis: Tensor) -> Tensor:
    """tr(QᵀAQ): the energy of a matrix that a basis holds."""
    return (basis * (matrix.to(basis.dtype) @ basis)).sum()


def _iterated(multiply: Product, rank: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Subspace iteration with some columns to spare; None when the captured energy does not settle."""
    generator = torch.Generator().manual_seed(0)
    columns = rank + max(16, rank // 4)
    block = torch.randn(like.shape[-1], columns, generator=generator, dtype=torch.float64)
    block = multiply(block.to(like.device, like.dtype))
    before = 0.0
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(block)[0]
        block = multiply(basis)
        values, rotation = torch.linalg.eigh(basis.mT.double() @ block.double())
        energy = values[-rank:].sum().item()
        if abs(energy - before) <= _TOLERANCE * abs(energy):
            vectors = basis.double() @ rotation[:, -rank:].flip(1)
            return values[-rank:].flip(0), torch.linalg.qr(vectors)[0]
        before = energy
    return None
