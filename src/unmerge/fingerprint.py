"""Checksums of tensors, the same on every device: do these weights equal those the statistics were read from?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A checksum a tensor: its type, shape and a 64-bit sum of its bits, each weighted by its place."""
    sums = [_weighted_sum(tensor.detach()) for tensor in tensors.values()]
    # One transfer a device instead of one a tensor.
    values: list[int] = [0] * len(sums)
    for device in {total.device for total in sums}:
        places = [place for place, total in enumerate(sums) if total.device == device]
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            values[place] = value
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{value & (2**64 - 1):016x}"
        for (name, tensor), value in zip(tensors.items(), values, strict=True)
    }


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model, also those that state_dict leaves out."""
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    return state


def differences(found: Mapping[str, str], expected: Mapping[str, str], names: Iterable[str] | None = None) -> list[str]:
    """The names, in order, whose checksums are not the same or that stand on one side only."""
    keys = list(dict.fromkeys([*expected, *found])) if names is None else list(names)
    return [name for name in keys if found.get(name) != expected.get(name)]


def _weighted_sum(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().reshape(-1)
    if bits.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    raw = bits.view(torch.uint8)
    bits = raw.view(torch.int32) if raw.numel() % 4 == 0 else raw
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        # Odd multipliers that differ from place to place; int64 products wrap, which is what a hash wants.
        weight = place.mul_(0x9E3779B97F4A7C1).add_(0x5851F42D4C957F2D).bitwise_or_(1)
        total += part.mul_(weight).sum()
    return total
