"""Random signs that every device, process and version makes alike."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

_HASHED = 1 << 18  # signs that are made at a time
_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53)

_held: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()


def signs(features: int, size: int, like: Tensor) -> Tensor:
    """Ω: (features, size) signs; fewer columns are its first. They are made anew where nobody holds them."""
    key = (features, size, like.dtype, like.device)
    found = _held.get(key)
    if found is None:
        found = torch.empty(features, size, dtype=like.dtype, device=like.device)
        columns = torch.arange(size, device=like.device)
        for rows in torch.arange(features, device=like.device).split(max(1, _HASHED // size)):
            # A hash of the place, of which one bit is taken: integer products wrap alike everywhere.
            mixed = (rows.unsqueeze(1) << 32) + columns + 1
            for multiplier in _MULTIPLIERS:
                mixed = mixed * multiplier
                mixed = mixed ^ (mixed >> 29)
            found[rows] = (1 - 2 * (mixed & 1)).to(like.dtype)
        _held[key] = found
    return found
