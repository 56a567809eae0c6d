"""Which sample is which: a key for every input row, so that splits and models can be matched without keeping inputs."""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = 0x1E3779B97F4A7C15
_CHUNK = 1 << 22  # products held at once


def row_keys(inputs: Tensor) -> Tensor:
    """A 64-bit checksum of the bits of every row, the same on every device and for every batch size."""
    if inputs.dtype == torch.bool:
        inputs = inputs.to(torch.uint8)
    rows = inputs.detach().reshape(len(inputs), inputs.shape[1:].numel()).contiguous()
    whole = rows.element_size() * rows.shape[1] % 4 == 0
    if whole and rows.data_ptr() % 4:
        rows = rows.clone()  # to where words begin
    words = rows.view(torch.int32 if whole else torch.uint8)
    places = torch.arange(words.shape[1], device=words.device)
    weights = mixed(places * _ODD + 0x5851F42D4C957F2D).bitwise_or_(1)
    step = max(1, _CHUNK // max(1, words.shape[1]))
    # int64 products and sums wrap, which is what a checksum wants.
    sums = [(part.to(torch.int64) * weights).sum(1) for part in words.split(step)]
    return mixed(torch.cat(sums)) if sums else torch.zeros(0, dtype=torch.int64, device=words.device)


def mixed(values: Tensor) -> Tensor:
    """The integers with their bits stirred, so that neighbours end far apart."""
    values = (values ^ (values >> 31)) * 0x7FB5D329728EA185
    values = (values ^ (values >> 27)) * 0x01DADEF4BC2DD44D
    return values ^ (values >> 33)


def draw_order(keys: Tensor, seed: int) -> Tensor:
    """The samples in an order that depends on their content and the seed, not on how the data came."""
    return mixed(keys ^ mixed(torch.tensor(seed + 1))).argsort(stable=True)


def shared(first: Tensor, second: Tensor) -> int:
    """How many rows of the first are also in the second."""
    return int(torch.isin(first, second).sum())


def alignment(keys: Tensor, labels: Tensor, to_keys: Tensor, to_labels: Tensor) -> Tensor | None:
    """The order that makes (keys, labels) equal to the other's, or None where they are not the same samples."""
    own, other = mixed(keys + labels * _ODD), mixed(to_keys + to_labels * _ODD)
    if len(own) != len(other):
        return None
    if torch.equal(own, other):
        return torch.arange(len(own))
    own_order, other_order = own.argsort(stable=True), other.argsort(stable=True)
    if not torch.equal(own[own_order], other[other_order]):
        return None
    order = torch.empty_like(own_order)
    order[other_order] = own_order
    return order
