"""The leading eigenvectors of a symmetric matrix: exact when it is small, iterated and checked when it is large."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from unmerge.moments import full_precision

EXACT_UP_TO = {"cpu": 1024, "cuda": 256}  # above, iterating is several times faster
# Relative gain of captured energy at which the iteration stops. A direction that stands out of a flat spectrum by 0.1 %
# gains this much even while it is hardly found, so that no more than that is missed.
_TOLERANCE = 3e-8
_ITERATIONS = 100
_CHECK_EVERY = 2

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
        if size > EXACT_UP_TO.get(like.device.type, 1024) and 4 * rank <= size:
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
    columns = rank + max(16, rank // 4)
    block = multiply(_start(like.shape[-1], columns).to(like.device, like.dtype))
    before = 0.0
    for iteration in range(1, _ITERATIONS + 1):
        basis = torch.linalg.qr(block)[0]
        image = multiply(basis)
        # Two products an orthogonalisation, which costs more than both; scaled, so that nothing overflows.
        block = multiply(image / image.norm().clamp_min(torch.finfo(image.dtype).tiny))
        if iteration % _CHECK_EVERY:
            continue
        # So small a problem is solved faster on the CPU, and the answer is needed there.
        values, rotation = torch.linalg.eigh((basis.mT.double() @ image.double()).cpu())
        energy = values[-rank:].sum().item()
        if abs(energy - before) <= _TOLERANCE * abs(energy):
            vectors = basis.double() @ rotation[:, -rank:].flip(1).to(basis.device)
            return values[-rank:].flip(0).to(basis.device), torch.linalg.qr(vectors)[0]
        before = energy
    return None


@lru_cache(maxsize=8)
def _start(size: int, columns: int) -> Tensor:
    """The same random block on every device."""
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(0))
