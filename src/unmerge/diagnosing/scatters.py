"""Scatters that are known by their products with blocks, and their sums and differences: none is formed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.sums.moments import Moments


@dataclass(frozen=True)
class Scatter:
    """Σ(x − m)(x − m)ᵀ as a sum of Gram matrices that are held elsewhere and of a few outer products c cᵀ."""

    n: float
    mean: Tensor
    grams: tuple[tuple[int, Tensor], ...]  # each with its sign
    columns: Tensor  # c, (d, few)
    signs: Tensor  # of each column

    @classmethod
    def of(cls, moments: Moments) -> Scatter:
        """The scatter of the rows that the moments count."""
        column = (moments.total / moments.n**0.5).unsqueeze(1)
        return cls(moments.n, moments.mean, ((1, moments.gram),), column, column.new_tensor([-1]))

    @property
    def like(self) -> Tensor:
        """A tensor of its shape, type and device."""
        return self.grams[0][1]

    def __matmul__(self, block: Tensor) -> Tensor:
        columns = self.columns.to(block.dtype)
        image = (columns * self.signs.to(block.dtype)) @ (columns.mT @ block)
        for sign, gram in self.grams:
            image.addmm_(gram.to(block.dtype), block, alpha=sign)
        return image

    def __add__(self, other: Scatter) -> Scatter:
        return self._joined(other, +1)

    def __sub__(self, other: Scatter) -> Scatter:
        return self._joined(other, -1)

    def in_one(self) -> Scatter:
        """This scatter with a single Gram of its own: products then cost one each."""
        (first, gram), *others = self.grams
        total = gram * first
        for sign, other in others:
            total.add_(other, alpha=sign)
        return replace(self, grams=((1, total),))

    def _joined(self, other: Scatter, sign: int) -> Scatter:
        """About the mean of all rows, or of those that are left."""
        n = self.n + sign * other.n
        if n <= 0:
            raise StatisticsError(f"cannot take {other.n} rows out of {self.n}.")
        between = (self.mean - other.mean) * (self.n * other.n / n) ** 0.5
        return Scatter(
            n,
            (self.n * self.mean + sign * other.n * other.mean) / n,
            self.grams + tuple((sign * own, gram) for own, gram in other.grams),
            torch.cat([self.columns, other.columns, between.unsqueeze(1)], dim=1),
            torch.cat([self.signs, sign * other.signs, self.signs.new_tensor([sign])]),
        )
