"""Count, mean and scatter of rows that arrive in any number of pieces."""

from __future__ import annotations

from copy import copy as copy_of

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.pivots import is_far, pivot_of
from unmerge.products import add_gram_, is_exact

_WIDENED = 4096  # rows that are copied to float64 at a time


class Moments:
    """n, mean and scatter (Σ(x − m)(x − m)ᵀ) of rows, updated in place, added and subtracted.

    A grouped layer has one mean and one scatter a group: (groups, d) and (groups, d, d).
    pivot: a point near the rows, about which their sums are taken; where none is given it is the first rows' mean.
    """

    def __init__(self, pivot: Tensor | None = None) -> None:
        self.n: float = 0  # whole, but for a sample that stands for more rows
        self.kept = torch.float32  # the type in which the scatter is known; float64 where rows are
        self._given = pivot
        self._pivot = torch.zeros(0)  # about which the sums below are taken
        self._total = torch.zeros(0)  # Σ(x − pivot), float64
        # Σ(x − pivot)(x − pivot)ᵀ, upper blocks only. On the CPU in float64 while rows are counted, so that sums over
        # batches that several processes share are those of one; a GPU has no memory for that.
        self._gram = torch.zeros(0)
        self._is_exact = False  # whether products are float64, too
        self._symmetric = True
        self._is_shifted = True

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """The moments of one set of rows (n, d)."""
        moments = cls()
        moments.update(rows)
        return moments

    @classmethod
    def build(cls, n: float, pivot: Tensor, total: Tensor, gram: Tensor, *, kept: torch.dtype | None = None) -> Moments:
        """Moments from sums about a pivot, the gram in full; kept: the type that it is to be narrowed to, if any."""
        moments = cls()
        moments.n, moments._pivot, moments._total, moments._gram = n, pivot.double(), total.double(), gram
        moments.kept = kept or gram.dtype
        return moments

    def update(self, rows: Tensor, row_sum: Tensor | None = None) -> Moments:
        """Count more rows, (n, d) or (groups, n, d); `row_sum` is their sum, where it is known already."""
        count = rows.shape[-2]
        if count == 0:
            return self
        if self.n == 0:
            self._start(rows)
        elif rows.shape[-1] != self._pivot.shape[-1] or rows.dim() != self._pivot.dim() + 1:
            raise StatisticsError(
                f"rows of shape {tuple(rows.shape)} do not fit moments of {tuple(self._pivot.shape)} features."
            )
        kind = torch.float64 if self._is_exact else rows.dtype
        for part in rows.split(_WIDENED, -2) if self._is_exact else [rows]:
            shifted = part - self._pivot.to(kind).unsqueeze(-2) if self._is_shifted else part.to(kind)
            if row_sum is None:
                self._total += shifted.sum(-2, dtype=torch.float64)
            self._add_squares_(shifted)
        if row_sum is not None:
            self._total += row_sum - count * self._pivot
        self.n += count
        return self

    @property
    def mean(self) -> Tensor:
        """The mean row, in float64."""
        self._check_counted()
        return self._pivot + self._total / self.n

    @property
    def scatter(self) -> Tensor:
        """Σ(x − m)(x − m)ᵀ about the mean."""
        self._check_counted()
        average = self._total / self.n**0.5
        return _add_outer(self.gram, average, -1)

    @property
    def covariance(self) -> Tensor:
        return self.scatter / self.n

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance."""
        return (self._squares() - self.total.square() / self.n) / self.n

    def scatter_about(self, centre: Tensor) -> Tensor:
        """Σ(x − c)(x − c)ᵀ about any point."""
        return _add_outer(self.scatter, (self.mean - centre) * self.n**0.5, +1)

    def about(self, centre: Tensor) -> Tensor:
        """The same in float64, without a matrix more."""
        sums = {"gram": self.gram.to(torch.float64, copy=True)}
        self._add_step_(sums, self.pivot - centre, +1)
        return sums["gram"]

    def is_finite(self) -> Tensor:
        """Whether no sum has overflowed or met a NaN, as a tensor, so that asking needs no wait."""
        return self._total.isfinite().all() & self._squares().to(self.kept).isfinite().all()

    @property
    def pivot(self) -> Tensor:
        self._check_counted()
        return self._pivot

    @property
    def total(self) -> Tensor:
        self._check_counted()
        return self._total

    @property
    def gram(self) -> Tensor:
        """Σ(x − pivot)(x − pivot)ᵀ, both triangles, in the type in which it is kept."""
        self._check_counted()
        self._fill_lower_()
        return self._gram.to(self.kept)

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sums of second order about the pivot by name, which add up where the pivot is the same."""
        return {"gram": self.gram}

    @property
    def open_sums(self) -> dict[str, Tensor]:
        """The same in the type in which they are counted, as long as they are not settled."""
        self._check_counted()
        self._fill_lower_()
        return self._counted

    def settle_(self) -> Moments:
        """Narrow the sums to the type in which they are kept: all rows are counted."""
        self._check_counted()
        if self._is_open and self._pivot.any():
            # Rounded about their own mean, sums do not tell which samples came first and gave the pivot.
            self.move_pivot_(self.mean.to(self.kept).double())
        return self._narrow_()

    def __add__(self, other: Moments) -> Moments:
        if self.n == 0 or other.n == 0:
            return (other if self.n == 0 else self).clone()
        return self._joined(other, +1)

    def __sub__(self, other: Moments) -> Moments:
        if other.n == 0:
            return self.clone()
        if other.n >= self.n:
            raise StatisticsError(f"cannot take {other.n} rows out of {self.n}.")
        rest = self._joined(other, -1)
        # Whatever is taken out of itself leaves no negative variance.
        if bool((rest.variance < -1e-3 * self.variance.amax(-1, keepdim=True)).any()):
            raise StatisticsError("the rows taken away were not among those counted: a variance would be negative.")
        return rest

    def clone(self) -> Moments:
        return self.to(None, copy=True)

    def to(self, device: torch.device | str | None, copy: bool = False) -> Moments:
        if self.n == 0:
            return copy_of(self)
        pivot, total = (tensor.to(device, copy=copy) for tensor in (self.pivot, self.total))
        sums = {name: part.to(device, copy=copy) for name, part in self.open_sums.items()}
        return self._of(self.n, pivot, total, sums, self.kept)

    def move_pivot_(self, pivot: Tensor) -> Moments:
        """The same sums about another pivot, in place."""
        step = self.pivot - pivot
        self._add_step_(self._counted, step, +1)
        self._total = self.total + self.n * step
        self._pivot = pivot
        return self

    def group(self, index: int) -> Moments:
        """The moments of one group of a grouped layer."""
        sums = {name: part[index] for name, part in self.open_sums.items()}
        return self._of(self.n, self.pivot[index], self.total[index], sums, self.kept)

    def reordered(self, order: Tensor) -> Moments:
        """The same with the features in another order, given by their places now."""
        gram = self.open_sums["gram"][..., order, :][..., order]
        return self._of(self.n, self.pivot[..., order], self.total[..., order], {"gram": gram}, self.kept)

    def __repr__(self) -> str:
        shape = "empty" if self.n == 0 else f"features={tuple(self._pivot.shape)}"
        return f"Moments(n={self.n}, {shape})"

    def _start(self, rows: Tensor) -> None:
        self.kept = torch.promote_types(rows.dtype, torch.float32)
        given, is_half = self._given, rows.dtype != self.kept
        if given is not None and is_half and not given.to(rows.dtype).double().equal(given.double()):
            given = None  # of other rows, since half precision cannot hold it
        if given is None or is_far(given.to(rows.device), rows):
            given = pivot_of(rows)
        self._is_shifted = not is_half or bool(given.any())
        self._pivot = given.to(rows.device, rows.dtype).double()
        self._total = torch.zeros_like(self._pivot)
        self._start_squares(torch.float64 if rows.device.type == "cpu" else self.kept)

    @property
    def _counted(self) -> dict[str, Tensor]:
        """The open sums as they are, of a Gram the upper blocks."""
        return {"gram": self._gram}

    def _start_squares(self, counted: torch.dtype) -> None:
        self._is_exact = is_exact(self._pivot.shape[-1], self._pivot.device)
        self._gram = torch.zeros(*self._pivot.shape, self._pivot.shape[-1], dtype=counted, device=self._pivot.device)

    @property
    def _is_open(self) -> bool:
        return self._gram.dtype != self.kept

    def _narrow_(self) -> Moments:
        self._gram = self._gram.to(self.kept)
        self._fill_lower_()
        return self

    def _fill_lower_(self) -> None:
        if not self._symmetric:
            upper = self._gram.triu_()
            upper += upper.triu(1).mT
            self._symmetric = True

    def _add_squares_(self, shifted: Tensor) -> None:
        add_gram_(self._gram, shifted)
        self._symmetric = False

    def _squares(self) -> Tensor:
        """Σ(x − pivot)² of each feature."""
        return self._gram.diagonal(dim1=-2, dim2=-1)

    def _of(self, n: float, pivot: Tensor, total: Tensor, sums: dict[str, Tensor], kept: torch.dtype) -> Moments:
        """Moments of the same kind from sums about a pivot."""
        return Moments.build(n, pivot, total, **sums, kept=kept)

    def _joined(self, other: Moments, sign: int) -> Moments:
        """The sums of both about this one's pivot, those of the other added or taken away."""
        if self.pivot.shape != other.pivot.shape:
            raise StatisticsError(
                f"moments of {tuple(self.pivot.shape)} and {tuple(other.pivot.shape)} features do not combine."
            )
        mine, theirs = self.open_sums, other.open_sums
        if {name: part.shape for name, part in mine.items()} != {name: part.shape for name, part in theirs.items()}:
            raise StatisticsError("moments and sketches, or sketches of different sizes, do not combine.")
        step = other.pivot - self.pivot
        sums = {name: torch.add(part, theirs[name], alpha=sign) for name, part in mine.items()}
        other._add_step_(sums, step, sign)
        total = self.total + sign * (other.total + other.n * step)
        kept = torch.promote_types(self.kept, other.kept)
        return self._of(self.n + sign * other.n, self.pivot, total, sums, kept)

    def _add_step_(self, sums: dict[str, Tensor], step: Tensor, sign: int) -> None:
        """Add (or take away) what the sums of these rows gain about a pivot that lies `step` below theirs."""
        # About the pivot p − s a sum Σyyᵀ becomes Σ(y + s)(y + s)ᵀ = Σyyᵀ + wsᵀ + swᵀ with w = Σy + ns/2.
        gram = sums["gram"]
        half = (self.total + self.n / 2 * step).to(gram.dtype).unsqueeze(-1)
        column = step.to(gram.dtype).unsqueeze(-1)
        gram.addcmul_(half, column.mT, value=sign).addcmul_(column, half.mT, value=sign)

    def _check_counted(self) -> None:
        if self.n == 0:
            raise StatisticsError("these moments have counted no rows yet.")


def _add_outer(matrix: Tensor, vector: Tensor, sign: int) -> Tensor:
    """matrix ± v vᵀ, formed in the matrix's type."""
    column = vector.to(matrix.dtype).unsqueeze(-1)
    return torch.addcmul(matrix, column, column.mT, value=sign)
