"""Moments of inputs so wide that their Gram does not fit: its product with a few random columns stands for it.

The product is linear in the Gram (a one-pass Nyström sketch), so sketches add up over batches, shards and machines and
subtract as Grams do. Means, variances and the sums of classes stay exact.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.moments import Moments
from unmerge.products import add_product_, full_precision

_BLOCK = 1024  # rows that are counted at a time
_HASHED = 1 << 18  # signs that are made at a time
_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53)

_held: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()


def signs(features: int, size: int, like: Tensor) -> Tensor:
    """Ω: (features, size) random signs, the same on every device and in every version; fewer columns are its first."""
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


class SketchedMoments(Moments):
    """Moments that know of their scatter its diagonal and its product with `size` columns of random signs."""

    def __init__(self, size: int, pivot: Tensor | None = None) -> None:
        super().__init__(pivot)
        self.size = size
        self._sketch = torch.zeros(0)  # Σ(x − pivot)(x − pivot)ᵀ Ω
        self._diagonal = torch.zeros(0)  # Σ(x − pivot)², float64

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
        moments.kept = kept or sketch.dtype
        moments.n, moments._pivot, moments._total = n, pivot.double(), total.double()
        moments._sketch, moments._diagonal = sketch, diagonal.double()
        return moments

    @property
    def signs(self) -> Tensor:
        """Ω, which is made anew where nobody holds it."""
        return signs(len(self._sketch), self.size, self._sketch.new_empty(0, dtype=self.kept))

    @property
    def gram(self) -> Tensor:
        raise StatisticsError(
            f"a layer with {len(self._pivot)} inputs was sketched to fit the memory (size {self.size}), so its Gram is "
            "not known, and this needs it. Collect without memory=, or with more."
        )

    @property
    def sums(self) -> dict[str, Tensor]:
        self._check_counted()
        return {"sketch": self._sketch.to(self.kept), "diagonal": self._diagonal}

    @property
    def open_sums(self) -> dict[str, Tensor]:
        self._check_counted()
        return self._counted

    def scatter_product(self, without: Tensor | None = None) -> Tensor:
        """S Ω with the scatter S about the mean, or with what is left of S without the scatter of some rows."""
        centre = (self.total / self.n**0.5).unsqueeze(0)
        taken = (centre if without is None else torch.cat([centre, without])).to(self.kept)
        with full_precision():
            return torch.addmm(self.sums["sketch"], taken.mT, taken @ self.signs, alpha=-1)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, sketch={self.size})"

    @property
    def _counted(self) -> dict[str, Tensor]:
        return {"sketch": self._sketch, "diagonal": self._diagonal}

    @property
    def _is_open(self) -> bool:
        return self._sketch.dtype != self.kept

    def _narrow_(self) -> Moments:
        self._sketch = self._sketch.to(self.kept)
        return self

    def _start_squares(self, counted: torch.dtype) -> None:
        if self._pivot.dim() > 1:
            raise StatisticsError("a grouped layer cannot be sketched: each of its groups has a Gram of its own.")
        self._sketch = torch.zeros(len(self._pivot), self.size, dtype=counted, device=self._pivot.device)
        self._diagonal = torch.zeros_like(self._pivot)

    def _add_squares_(self, shifted: Tensor) -> None:
        columns = self.signs
        with full_precision():
            for rows in shifted.split(_BLOCK):
                rows = rows.to(self.kept)
                add_product_(self._sketch, rows.mT, rows @ columns)
                self._diagonal += rows.square().sum(0, dtype=torch.float64)

    def _squares(self) -> Tensor:
        return self._diagonal

    def _of(self, n: float, pivot: Tensor, total: Tensor, sums: dict[str, Tensor], kept: torch.dtype) -> Moments:
        return SketchedMoments.of_sums(n, pivot, total, **sums, kept=kept)

    def _add_step_(self, sums: dict[str, Tensor], step: Tensor, sign: int) -> None:
        sketch, columns = sums["sketch"], self.signs
        half = self.total + self.n / 2 * step
        pair = torch.stack([half, step]).to(sketch.dtype)
        with full_precision():
            sketch.addmm_(pair.mT, (pair @ columns.to(sketch.dtype)).flip(0), alpha=sign)
        sums["diagonal"].add_(2 * half * step, alpha=sign)


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


def moments_of(
    n: float, pivot: Tensor, total: Tensor, sums: dict[str, Tensor], kept: torch.dtype | None = None
) -> Moments:
    """Moments, or a sketch, from sums about a pivot as `Moments.sums` names them."""
    return (SketchedMoments.of_sums if "sketch" in sums else Moments.build)(n, pivot, total, **sums, kept=kept)
