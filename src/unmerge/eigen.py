"""The leading eigenvectors of a symmetric matrix: exact when it is small, iterated and checked when it is large."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from unmerge.moments import full_precision

EXACT_UP_TO = {"cpu": 1024, "cuda": 256}  # above, iterating is several times faster
_TOLERANCE = 1e-6  # relative gain of captured energy between two looks at which the iteration stops
_CHECK_EVERY = 2
_COLUMNS = 480  # of the Krylov basis before a restart
_RESTARTS = 4

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
    """Block Krylov iteration in the squared matrix with restarts; None when the captured energy does not settle."""
    width = rank + max(8, rank // 4)
    longest = max(8, _COLUMNS // width)  # blocks before a restart
    block = torch.linalg.qr(_start(like.shape[-1], width).to(like.device, like.dtype))[0]
    before = 0.0
    for _ in range(_RESTARTS):
        basis, projected = block, like.new_zeros(0, 0)
        for step in range(1, longest + 1):
            image = multiply(block)
            projected = _bordered(projected, basis.mT @ image)
            if step % _CHECK_EVERY == 0 or step == longest:
                # So small a problem is solved faster on the CPU, and the answer is needed there.
                small = projected.double().cpu()
                energy = torch.linalg.eigvalsh(small)[-rank:].sum().item()
                settled = abs(energy - before) <= _TOLERANCE * abs(energy)
                before = energy
                if settled or step == longest:
                    values, rotation = (part.to(like.device) for part in torch.linalg.eigh(small))
                    if settled:
                        vectors = basis.double() @ rotation[:, -rank:].flip(1)
                        return values[-rank:].flip(0), torch.linalg.qr(vectors)[0]
                    block = torch.linalg.qr(basis @ rotation[:, -width:].to(basis.dtype))[0]
                    break
            # Two products a step: the orthogonalisation costs more. Scaled, so that nothing overflows.
            block = multiply(image / image.norm().clamp_min(torch.finfo(image.dtype).tiny))
            for _ in range(2):  # what the first pass leaves of the basis is rounding of the size of the block
                block = torch.linalg.qr(block - basis @ (basis.mT @ block))[0]
            basis = torch.cat([basis, block], dim=1)
    return None


def _bordered(projected: Tensor, column: Tensor) -> Tensor:
    """A symmetric matrix with one more block of columns, and of rows."""
    known, width = len(projected), column.shape[1]
    larger = projected.new_zeros(known + width, known + width)
    larger[:known, :known] = projected
    larger[:, known:], larger[known:] = column, column.mT
    corner = column[known:]
    larger[known:, known:] = (corner + corner.mT) / 2
    return larger


@lru_cache(maxsize=8)
def _start(size: int, columns: int) -> Tensor:
    """The same random block on every device."""
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(0))
