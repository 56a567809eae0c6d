"""Which positions of a batch count, found once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counting:
    """A mask, and the places of what it counts: rows taken by a mask make the CPU wait for a GPU at every layer."""

    mask: Tensor  # (samples, positions)
    places: Tensor  # of the counted positions among all, in order
    known: Tensor  # the same on the CPU

    @classmethod
    def of(cls, mask: Tensor) -> Counting:
        known = mask.cpu().flatten().nonzero()[:, 0]
        return cls(mask, known.to(mask.device, non_blocking=True), known)

    def to(self, device: torch.device) -> Counting:
        if self.mask.device == device:
            return self
        return replace(self, mask=self.mask.to(device), places=self.places.to(device))

    def rows(self, part: slice, places: int) -> Tensor:
        """The places of what counts in a part of a layer's input, which has so many rows in each entry."""
        if part == slice(None):
            return self.places
        start, stop = part.start * places, part.stop * places
        first, last = torch.searchsorted(self.known, torch.tensor([start, stop])).tolist()
        return self.places[first:last] - start
