"""A sample of bounded size of the rows of a pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    """How the rows of a sample were drawn, so that samples of parts of the data make one of all."""

    keys: Tensor
    places: Tensor  # in the data
    size: int  # how many were wanted

    @classmethod
    def nothing(cls) -> Drawn:
        return cls(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), 0)


class Reservoir:
    """A uniform sample of rows of bounded size: each row draws a key, the smallest keys stay.

    The keys depend on the seed and on the row's place in the data, not on who reads them.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._batch: int | None = None
        self._offered = 0
        self._generator = torch.Generator()
        self._keys = torch.zeros(0, dtype=torch.float64)
        self._places = torch.zeros(0, dtype=torch.int64)
        self.rows: Tensor | None = None

    @property
    def drawn(self) -> Drawn:
        return Drawn(self._keys, self._places, self._size)

    def offer(self, rows: Tensor, batch: int = 0) -> None:
        """Draw from more rows of the batch with this number."""
        if batch != self._batch:
            self._batch, self._offered = batch, 0
            self._generator.manual_seed((self._seed * 0x9E3779B97F4A7C15 + batch * 0xD1B54A32D192ED03) % 2**63)
        count = rows.shape[-2]
        keys = torch.rand(count, generator=self._generator, dtype=torch.float64)
        places = torch.arange(self._offered, self._offered + count) + (batch << 32)
        self._offered += count
        if len(self._keys) == self._size:
            fresh = (keys < self._keys.max()).nonzero()[:, 0]
            keys, places, rows = keys[fresh], places[fresh], rows[..., fresh.to(rows.device), :]
        rows = rows.detach()
        self._keys, self._places = torch.cat([self._keys, keys]), torch.cat([self._places, places])
        self.rows = rows.clone() if self.rows is None else torch.cat([self.rows, rows], dim=-2)
        if len(self._keys) > self._size:
            kept = self._keys.topk(self._size, largest=False).indices.sort().values
            self._keys, self._places = self._keys[kept], self._places[kept]
            self.rows = self.rows[..., kept.to(rows.device), :]
