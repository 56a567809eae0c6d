"""Matrix products in the precision that sums over many rows need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Features a block of the Gram; on the CPU a block of the product stays in the cache until it is added.
_BLOCK = {"cpu": 256, "cuda": 768}
# Features up to which float64 products cost a CPU little beside the layers around them.
_NARROW = 1024


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products without TF32, whatever the user has set: it loses directions that the edit needs."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def is_exact(features: int, device: torch.device) -> bool:
    """Whether products of rows with so many features are formed in float64: their sum is then that of any batches."""
    return device.type == "cpu" and features <= _NARROW


def add_gram_(gram: Tensor, rows: Tensor) -> None:
    """gram += rowsᵀ rows, the blocks on and above the diagonal only."""
    features, size = gram.shape[-1], _BLOCK["cuda" if gram.is_cuda else "cpu"]
    for start in range(0, features, size):
        block = slice(start, min(start + size, features))
        add_product_(gram[..., block, start:], rows[..., block].mT, rows[..., start:])


def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right; the product is in the factors' type, float32 at least, whatever that of the sum is."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # Half-precision inputs, float32 sums: the products are exact and the matrix units run at full rate.
        add_product = torch.baddbmm if out.dim() == 3 else torch.addmm
        add_product(out, left, right, out_dtype=out.dtype, out=out)
        return
    kind = torch.promote_types(left.dtype, torch.float32)
    left, right = left.to(kind), right.to(kind)
    with full_precision():
        if out.dtype != kind:
            out += left @ right
        elif out.dim() == 3:
            out.baddbmm_(left, right)
        else:
            out.addmm_(left, right)
