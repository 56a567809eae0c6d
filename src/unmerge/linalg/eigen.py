"""The leading eigenvectors of a symmetric matrix: exact when it is small, iterated and checked when it is large."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from unmerge.linalg.orthonormal import orthonormal_columns
from unmerge.linalg.products import full_precision

EXACT_UP_TO = {"cpu": 1024, "cuda": 256}  # above, iterating is several times faster
_FOR_EACH = {"cpu": 4, "cuda": 32}  # features for each direction that is asked for, from which on it is
_DENSE_IF_FLAT = 2048  # width up to which a GPU finds all eigenvectors where sweeps do not settle
_TOLERANCE = 3e-5  # share of the captured energy still to be gained at which the iteration stops
_LOOKS = frozenset({1, 2, 3, 4, 6, 8, 11, 15})  # steps after which the energy is looked at
_COLUMNS = 480  # of the Krylov basis before a restart
_RESTARTS = 4
_WIDER, _SWEEPS = 5, 10  # of the iteration on a GPU: columns for each that is asked for, and products

Product = Callable[[Tensor], Tensor]


def top_eigenpairs(
    matrix: Tensor | Product,
    rank: int,
    like: Tensor | None = None,
    start: Tensor | None = None,
    most: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues, descending, and their eigenvectors (d, rank), both float64.

    The matrix may be given as a product with (d, k) blocks; `like` is then a (d, d) tensor of its device and type.
    start: the leading eigenvectors of a similar matrix, from which few steps are needed.
    most: steps of the iteration, after which it ends with the directions that a flat spectrum has shown by then. They
    depend on the random start: bases that are compared need two, by their `seed`.
    """
    multiply: Product = matrix.__matmul__ if isinstance(matrix, Tensor) else matrix
    like = matrix if isinstance(matrix, Tensor) else like
    assert like is not None
    size = like.shape[-1]
    rank = min(rank, size)
    if rank == 0:
        return like.new_zeros(0, dtype=torch.float64), like.new_zeros(size, 0, dtype=torch.float64)
    with full_precision():
        if is_iterated(size, rank, like.device.type):
            sweeps = like.is_cuda and most is None
            found = swept(multiply, rank, like, start) if sweeps else None
            if found is None and not (sweeps and size <= _DENSE_IF_FLAT):
                found = _iterated(multiply, rank, like, start, most, seed)
            if found is not None:
                return found
        values, vectors = torch.linalg.eigh(_dense(matrix, like))
        return values[-rank:].flip(0), vectors[:, -rank:].flip(1)


def is_iterated(size: int, rank: int, device: str) -> bool:
    """Whether so many eigenvectors are iterated on a type of device."""
    return size > EXACT_UP_TO.get(device, 1024) and _FOR_EACH.get(device, 4) * rank <= size


def may_be_dense(size: int, rank: int, device: str) -> bool:
    """Whether all eigenvectors may be found on a type of device, which takes memory."""
    return not is_iterated(size, rank, device) or (device == "cuda" and size <= _DENSE_IF_FLAT)


def _dense(matrix: Tensor | Product, like: Tensor) -> Tensor:
    """The matrix itself in float64, symmetric to the last digit."""
    if not isinstance(matrix, Tensor):
        matrix = matrix(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device))
    return (matrix.double() + matrix.mT).div_(2)


def captured(matrix: Tensor, basis: Tensor) -> Tensor:
    """tr(QᵀAQ): the energy of a matrix that a basis holds."""
    return (basis * (matrix.to(basis.dtype) @ basis)).sum()


def swept(multiply: Product, rank: int, like: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Subspace iteration with a wide block; None where the spectrum falls too slowly, or to nothing, within it.

    For a GPU, where columns cost little and every look at the energy costs a wait: there is one, at the end.
    """
    size = like.shape[-1]
    width = min(_WIDER * rank, size // 2)
    block = _start(size, width).to(like.device, like.dtype)
    if start is not None:
        block = torch.cat([start.to(like.dtype), block], dim=1)[:, :width]
    block = orthonormal_columns(block)
    for _ in range(_SWEEPS):
        block = orthonormal_columns(multiply(block))
    small = (block.mT @ multiply(block)).double().cpu()
    if not small.isfinite().all():  # as of a matrix of zeros
        return None
    values, rotation = torch.linalg.eigh((small + small.mT) / 2)
    # What is missing of a direction shrinks with each sweep by the squared ratio of the next value to its own.
    last, next_one = values[-rank], values[width // 4]
    if next_one > (_TOLERANCE / 100) ** (0.5 / _SWEEPS) * last or last <= 1e-6 * values[-1]:
        return None
    vectors = block.double() @ rotation[:, -rank:].flip(1).to(like.device)
    return values[-rank:].flip(0).to(like.device), orthonormal_columns(vectors)


def _iterated(
    multiply: Product, rank: int, like: Tensor, start: Tensor | None, most: int | None, seed: int
) -> tuple[Tensor, Tensor] | None:
    """Block Krylov iteration in the squared matrix with restarts; None when the captured energy does not settle."""
    width = rank + max(8, rank // 4)
    longest = most or max(8, _COLUMNS // width)  # blocks before a restart
    block = _start(like.shape[-1], width, seed).to(like.device, like.dtype)
    if start is not None:
        # Some columns stay random, for directions that only this matrix has.
        block = torch.cat([start[:, : rank + 4].to(like.dtype), block], dim=1)[:, :width]
    block = _orthonormal(block)
    for _ in range(_RESTARTS):
        basis, columns = block, []
        energies: list[tuple[int, float]] = []  # after how many steps, and how much
        for step in range(1, longest + 1):
            image = multiply(block)
            columns.append((basis.mT @ image).double().cpu())
            found = step == most
            if not found and (step in _LOOKS or step == longest):
                energies.append((step, torch.linalg.eigvalsh(_symmetric(columns))[-rank:].sum().item()))
                found = _still_to_gain(energies) <= _TOLERANCE * abs(energies[-1][1])
            if not found and step < longest:
                # Two products a step: the orthogonalisation costs more. Scaled, so that nothing overflows.
                block = multiply(image / image.norm().clamp_min(torch.finfo(image.dtype).tiny))
                rest = block - basis @ (basis.mT @ block)
                found = bool(rest.norm() <= 1000 * torch.finfo(rest.dtype).eps * block.norm())  # nothing is left
            if found or step == longest:
                values, rotation = torch.linalg.eigh(_symmetric(columns))
            if found:
                vectors = basis.double() @ rotation[:, -rank:].flip(1).to(like.device)
                return values[-rank:].flip(0).to(like.device), _orthonormal(vectors)
            if step < longest:
                block = _orthonormal_rest(basis, rest)
                basis = torch.cat([basis, block], dim=1)
        block = _orthonormal(basis @ rotation[:, -width:].to(basis.device, basis.dtype))
    return None


def _still_to_gain(energies: list[tuple[int, float]]) -> float:
    """What the captured energy would still grow by if its gains a step went on shrinking as the last two did."""
    gains = [(high - low) / (later - early) for (early, low), (later, high) in pairwise(energies[-3:])]
    if gains and gains[-1] <= _TOLERANCE / 3 * abs(energies[-1][1]):
        return 0.0
    if len(gains) < 2:
        return float("inf")
    earlier, gain = gains
    ratio = gain / earlier if earlier > gain else 1.0
    return gain * ratio / (1 - ratio) if ratio < 1 else float("inf")


def _orthonormal_rest(basis: Tensor, rest: Tensor) -> Tensor:
    """An orthonormal block of what the basis does not hold."""
    block = _orthonormal(rest)
    left = basis.mT @ block
    # Where the basis held nearly all, rounding of the size of the block is left.
    return block if _is_rounding(left) else _orthonormal(block - basis @ left)


def _orthonormal(block: Tensor) -> Tensor:
    """An orthonormal basis of the span of some columns, dependent or not."""
    found = orthonormal_columns(block)
    if not found.is_cuda:
        return found
    identity = torch.eye(found.shape[1], dtype=found.dtype, device=found.device)
    return found if _is_rounding(found.mT @ found - identity) else torch.linalg.qr(block)[0]


def _is_rounding(products: Tensor) -> bool:
    """Whether inner products of unit columns are as small as rounding leaves them, and no NaN."""
    return bool(products.abs().max() <= max(100 * torch.finfo(products.dtype).eps, 1e-11))


def _symmetric(columns: list[Tensor]) -> Tensor:
    """The projected matrix from its block columns, each down to the diagonal."""
    # So small a problem is solved faster on the CPU than on a GPU, and the answer is needed there.
    size = columns[-1].shape[0]
    full = torch.zeros(size, size, dtype=torch.float64)
    for column in columns:
        height, width = column.shape
        full[:height, height - width : height] = column
    upper = full.triu()
    return upper + upper.triu(1).mT


@lru_cache(maxsize=8)
def _start(size: int, columns: int, seed: int = 0) -> Tensor:
    """The same random block on every device."""
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(seed))
