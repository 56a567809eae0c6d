"""Orthonormal columns by the way that suits the device: on a GPU the QR of a tall block is what a solve waits for."""

from __future__ import annotations

import torch
from torch import Tensor

NEGLIGIBLE = 1e-6
NOISE = {torch.float32: 1e-6, torch.float64: 1e-12}  # share of the largest eigenvalue that is rounding of a scatter
_DEPENDENT = 1e-4  # a unit column whose part outside the columns before it is smaller: their Gram is of no use
_FEW = 32  # columns that are factorised faster on the CPU, the way there and back included


def orthonormal_columns(block: Tensor) -> Tensor:
    """An orthonormal basis of the span of some columns, which are not nearly dependent."""
    if not block.is_cuda:
        return torch.linalg.qr(block)[0]
    columns = block.double()
    for _ in range(2):  # once more, since the Gram squares the condition of the columns
        gram = columns.mT @ columns
        gram.diagonal().add_(1e-14 * gram.diagonal().sum())
        columns = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram)[0].mT, columns, upper=True, left=False)
    return columns.to(block.dtype)


def thin_qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """QR of a few columns, dependent or not."""
    if columns.is_cuda and columns.shape[-1] <= _FEW:
        basis, upper = torch.linalg.qr(columns.cpu())
        return basis.to(columns.device), upper.to(columns.device)
    return torch.linalg.qr(columns)


def spanning(columns: Tensor, at_least: Tensor) -> Tensor:
    """Left singular vectors of some columns: those above 1e-6 of the largest singular value and `at_least`."""
    # By way of the small Gram matrix: a tall SVD on a GPU takes longer than all the rest.
    values, rotation = torch.linalg.eigh((columns.mT @ columns).cpu())
    sizes = values.clamp_min(0).sqrt()
    kept = (sizes > NEGLIGIBLE * sizes[-1:]) & (sizes > at_least.cpu())
    rotation = (rotation[:, kept] / sizes[kept]).flip(1).to(columns.device)
    # Once more, since the Gram resolves small values less well than the columns do.
    return orthonormal_columns(columns @ rotation)


def column_span(columns: Tensor, at_least: Tensor) -> Tensor:
    """An orthonormal basis of the span of some columns, dependent or not, of those that are as large as `at_least`."""
    if columns.shape[1] == 0:
        return columns
    sizes = columns.norm(dim=0)
    scaled = columns / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    factor, failed = torch.linalg.cholesky_ex(scaled.mT @ scaled)
    dependent = (
        (failed != 0)
        | (factor.diagonal().min() < _DEPENDENT)
        | (sizes.min() < torch.maximum(NEGLIGIBLE * sizes.max(), at_least))
    )
    return spanning(columns, at_least) if dependent else orthonormal_columns(scaled)


def outside(columns: Tensor, others: Tensor, at_least: Tensor) -> Tensor:
    """The part of some columns that lies outside the span of others, as far as those are as large as `at_least`."""
    span = column_span(others, at_least)
    rest = columns
    for _ in range(2):  # once more, since the first time leaves rounding of the size of the columns
        rest = rest - span @ (span.mT @ rest)
    return rest


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Rows to orthonormal columns in order; a row that earlier ones explain to 1e-6 is dropped."""
    given = rows.double().cpu()  # too small for a GPU
    basis, upper = torch.linalg.qr(given.mT)
    lengths = upper.diagonal()  # of what earlier rows leave, if they all count
    if len(lengths) == len(given) and bool((lengths.abs() > NEGLIGIBLE * given.norm(dim=1)).all()):
        return (basis * lengths.sign()).contiguous().to(rows.device)
    found = torch.zeros_like(given)
    count = 0
    for row in given:
        left = row
        for _ in range(2):  # once more, since the first pass leaves rounding of the size of the row
            left = left - (found[:count] @ left) @ found[:count]
        if left.norm() > NEGLIGIBLE * row.norm():
            found[count] = left / left.norm()
            count += 1
    return found[:count].mT.contiguous().to(rows.device)
