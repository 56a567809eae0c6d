"""What the layers need to know of the batch in flight: sizes, labels, and which positions count."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmerge.errors import DataError
from unmerge.model.experts import Routed


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


@dataclass(frozen=True)
class BatchFacts:
    """Sizes, labels and mask of a batch."""

    size: int
    codes: Tensor | None  # for each sample the place of its class in `Statistics.classes`
    present: tuple[int, ...]  # the codes that occur
    classes: int  # how many there are so far
    counting: Counting | None  # which positions count; None: all
    number: int = 0  # the place of the batch in the data

    @property
    def tells_rows_apart(self) -> bool:
        """Whether it matters which sample and position a row is of."""
        return self.codes is not None or self.counting is not None

    def to(self, device: torch.device) -> BatchFacts:
        """The facts on a layer's device, where a model is spread over several."""
        codes = None if self.codes is None else self.codes.to(device)
        counting = None if self.counting is None else self.counting.to(device)
        return replace(self, codes=codes, counting=counting)

    def of(self, routed: Routed) -> BatchFacts:
        """The facts of some tokens, each a sample of its own."""
        assert routed.rows is not None
        mask = None if self.counting is None else self.counting.mask
        if routed.tokens % self.size or (mask is not None and mask.numel() != routed.tokens):
            raise DataError(
                f"an expert's layer sees some of {routed.tokens} tokens, which do not fit {self.size} samples"
                + ("." if mask is None else f" and a mask of shape {tuple(mask.shape)}.")
            )
        codes = None if self.codes is None else self.codes[routed.rows // (routed.tokens // self.size)]
        counting = None if mask is None else Counting.of(mask.reshape(-1, 1)[routed.rows])
        return replace(self, size=len(routed.rows), codes=codes, counting=counting)

    def kept(self, part: slice, leading: int, places: int) -> tuple[Tensor | None, Tensor | None]:
        """The mask of a part of the batch, and the places of the rows that it counts; None where all count."""
        if self.counting is None:
            return None, None
        mask = self.counting.mask.flatten(1)
        if mask.shape == (leading, places):
            return mask[part], self.counting.rows(part, places)
        if places == 1 and leading == mask.numel():
            return mask.reshape(-1, 1)[part], self.counting.rows(part, places)
        if places == 1 and leading == self.size:
            return None, None  # one row a sample: a pooled layer, where positions are gone
        raise DataError(
            f"the mask has shape {tuple(self.counting.mask.shape)}, but a layer has {leading} x {places} rows. "
            "Pass mask= with one entry for each position, or leave the layer out."
        )
