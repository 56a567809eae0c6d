"""Moments of inputs so wide that their Gram does not fit: its product with a few random columns stands for it.

The product is linear in the Gram (a one-pass Nyström sketch), so sketches add up over batches, shards and machines and
subtract as Grams do. Means, variances and the sums of classes stay exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.linalg.products import add_product_, full_precision
from unmerge.linalg.signs import signs
from unmerge.sums.moments import Moments
from unmerge.sums.second_order import Sums

_BLOCK = 1024  # rows that are counted at a time


class SketchedMoments(Moments):
    """Moments that know of their scatter its diagonal and its product with `size` columns of random signs."""

    def __init__(self, size: int, pivot: Tensor | None = None) -> None:
        super().__init__(pivot)
        self.size = size

    @classmethod
    def of_sums(
        cls,
        n: float,
        pivot: Tensor,
        total: Tensor,
        sketch: Tensor,
        diagonal: Tensor,
        *,
        kept: torch.dtype | None = None,
    ) -> SketchedMoments:
        moments = cls(sketch.shape[-1])
        moments.n, moments._pivot, moments._total = n, pivot.double(), total.double()
        moments._sums, moments.kept = {"sketch": sketch, "diagonal": diagonal.double()}, kept or sketch.dtype
        return moments

    @property
    def signs(self) -> Tensor:
        """Ω, which is held as long as somebody holds it."""
        return signs(len(self._pivot), self.size, self._pivot.new_empty(0, dtype=self.kept))

    @property
    def gram(self) -> Tensor:
        raise StatisticsError(
            f"a layer with {len(self._pivot)} inputs was sketched to fit the memory (size {self.size}), so its Gram is "
            "not known, and this needs it. Collect without memory=, or with more."
        )

    def scatter_product(self, without: Tensor | None = None) -> Tensor:
        """S Ω with the scatter S about the mean, or with what is left of S without the scatter of some rows."""
        centre = (self.total / self.n**0.5).unsqueeze(0)
        taken = (centre if without is None else torch.cat([centre, without])).to(self.kept)
        with full_precision():
            return torch.addmm(self.sums["sketch"], taken.mT, taken @ self.signs, alpha=-1)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, sketch={self.size})"

    def _start_squares(self, counted: torch.dtype) -> None:
        if self._pivot.dim() > 1:
            raise StatisticsError("a grouped layer cannot be sketched: each of its groups has a Gram of its own.")
        sketch = torch.zeros(len(self._pivot), self.size, dtype=counted, device=self._pivot.device)
        self._sums = {"sketch": sketch, "diagonal": torch.zeros_like(self._pivot)}

    def _add_squares_(self, shifted: Tensor) -> None:
        columns = self.signs
        with full_precision():
            for rows in shifted.split(_BLOCK):
                rows = rows.to(self.kept)
                add_product_(self._sums["sketch"], rows.mT, rows @ columns)
                self._sums["diagonal"] += rows.square().sum(0, dtype=torch.float64)

    def _of(self, n: float, pivot: Tensor, total: Tensor, sums: Sums, kept: torch.dtype) -> Moments:
        return SketchedMoments.of_sums(n, pivot, total, **sums, kept=kept)


def sketched(moments: Moments, size: int) -> Moments:
    """A sketch of at most this size: of a Gram by its product, of a sketch by its first columns; what is less stays."""
    known = moments.size if isinstance(moments, SketchedMoments) else moments.pivot.shape[-1]
    if known <= size:
        return moments
    if isinstance(moments, SketchedMoments):
        sums = {**moments.sums, "sketch": moments.sums["sketch"][:, :size].contiguous()}
    else:
        gram = moments.gram
        with full_precision():
            product = gram @ signs(len(gram), size, gram)
        sums = {"sketch": product, "diagonal": gram.diagonal().double()}
    return SketchedMoments.of_sums(moments.n, moments.pivot, moments.total, **sums, kept=moments.kept)


def moments_of(n: float, pivot: Tensor, total: Tensor, sums: Sums, kept: torch.dtype | None = None) -> Moments:
    """Moments, or a sketch, from sums about a pivot as `Moments.sums` names them."""
    return (SketchedMoments.of_sums if "sketch" in sums else Moments.build)(n, pivot, total, **sums, kept=kept)
