"""Matrix products in the precision that sums over many rows need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BLOCK = 768  # features a block of the Gram


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products without TF32, whatever the user has set: it loses directions that the edit needs."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def add_gram_(gram: Tensor, rows: Tensor) -> None:
    """gram += rowsᵀ rows in the gram's type, the blocks on and above the diagonal only."""
    features = gram.shape[-1]
    for start in range(0, features, _BLOCK):
        block = slice(start, min(start + _BLOCK, features))
        add_product_(gram[..., block, start:], rows[..., block].mT, rows[..., start:])


def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right in the type of `out`."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # Half-precision inputs, float32 sums: the products are exact and the matrix units run at full rate.
        product = torch.bmm if out.dim() == 3 else torch.mm
        out += product(left, right, out_dtype=out.dtype)
        return
    with full_precision():
        add_ = out.baddbmm_ if out.dim() == 3 else out.addmm_
        add_(left.to(out.dtype), right.to(out.dtype))
