"""The point near some rows about which their sums are taken."""

from __future__ import annotations

import torch
from torch import Tensor

_MEAN_TO_DEVIATION = 10.0
_SOME = 4096  # rows that are looked at


def pivot_near(rows: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """The given pivot in the rows' type, or their own where there is none or it is that of other rows.

    And whether it is other than zero, as a tensor: of the given one where that is, on a CPU nobody waits for it.
    """
    if given is not None and not _is_rounded(given, rows.dtype):
        placed = given.to(rows.device)
        if not is_far(placed, rows):
            return placed.to(rows.dtype), given.any()
    pivot = pivot_of(rows)
    return pivot, pivot.any()


def pivot_of(rows: Tensor) -> Tensor:
    """The point about which sums over such rows are taken: with |mean| >> deviation raw sums cancel to noise.

    In the rows' own type, so that nearby values subtract without error.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    pivot = rows.mean(-2, dtype=wide).to(rows.dtype)
    if rows.dtype == wide:
        return pivot
    # Half-precision rows multiply without error as they are; a shift where none is needed would round them.
    return torch.where(mean_dominates(rows), pivot, torch.zeros_like(pivot))


def mean_dominates(rows: Tensor) -> Tensor:
    """In which channels the mean is so much larger than the deviation that float32 sums need a pivot."""
    some = rows[..., :_SOME, :].float()
    mean, deviation = some.mean(-2), some.std(-2, correction=0)
    # A channel that never changes has no deviation to lose.
    return (mean.abs() > _MEAN_TO_DEVIATION * deviation) & (deviation > 0)


def is_far(pivot: Tensor, rows: Tensor) -> bool:
    """Whether a pivot, which other rows may have given, lies too far from these for sums of float32 products."""
    some = rows[..., :_SOME, :].float() - pivot.float().unsqueeze(-2)
    # All channels together: one that is nearly silent in a few rows tells nothing.
    mean, variance = some.mean(-2), some.var(-2, correction=0)
    far = mean.square().sum(-1) > _MEAN_TO_DEVIATION**2 * variance.sum(-1)
    return bool(far.any() & (variance > 0).any())  # one answer to wait for, not two


def _is_rounded(pivot: Tensor, kind: torch.dtype) -> bool:
    """Whether half-precision rows cannot have given this pivot, since their type cannot hold it."""
    is_half = kind != torch.promote_types(kind, torch.float32)
    return is_half and not pivot.to(kind).double().equal(pivot.double())
