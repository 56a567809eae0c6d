"""Count, mean and scatter of rows that arrive in any number of pieces."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy as copy_of

import torch
from torch import Tensor

from unmerge.errors import StatisticsError
from unmerge.linalg.products import add_gram_, is_exact
from unmerge.sums.pivots import pivot_near
from unmerge.sums.second_order import (
    Sums,
    add_outer,
    add_step_,
    combined,
    fill_lower_,
    matrix_of,
    narrowed,
    squares,
    witness,
)

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
        # Those of second order, of a Gram its upper blocks. On the CPU in float64 while rows are counted, so that sums
        # over batches that several processes share are those of one; a GPU has no memory for that.
        self._sums: Sums = {}
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
        moments.n, moments._pivot, moments._total = n, pivot.double(), total.double()
        moments._sums, moments.kept = {"gram": gram}, kept or gram.dtype
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
        return self.pivot + self.total / self.n

    @property
    def scatter(self) -> Tensor:
        """Σ(x − m)(x − m)ᵀ about the mean."""
        average = self.total / self.n**0.5
        return add_outer(self.gram, average, -1)

    @property
    def covariance(self) -> Tensor:
        return self.scatter / self.n

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance."""
        of_mean = self.total.square() / self.n
        return (squares(self._sums) - of_mean) / self.n

    def scatter_about(self, centre: Tensor) -> Tensor:
        """Σ(x − c)(x − c)ᵀ about any point."""
        return add_outer(self.scatter, (self.mean - centre) * self.n**0.5, +1)

    def about(self, centre: Tensor) -> Tensor:
        """Σ(x − c)(x − c)ᵀ about any point in float64, made without a second matrix."""
        sums = {"gram": self.gram.to(torch.float64, copy=True)}
        add_step_(sums, self.n, self.total, self.pivot - centre, +1)
        return sums["gram"]

    def witness(self) -> Tensor:
        """A number that is finite where no sum has overflowed or met a NaN."""
        return witness(self._total, squares(self._sums), self.kept)

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
        return self.sums["gram"]

    @property
    def sums(self) -> Sums:
        """The sums of second order about the pivot by name, which add up where the pivot is the same."""
        return narrowed(self.open_sums, self.kept)

    @property
    def open_sums(self) -> Sums:
        """The sums of second order in the type in which they are counted, as long as they are not settled."""
        self._check_counted()
        self._fill_lower_()
        return self._sums

    def settle_(self) -> Moments:
        """Narrow the sums to the type in which they are kept: all rows are counted."""
        self._check_counted()
        if matrix_of(self._sums).dtype != self.kept and self._pivot.any():
            # Rounded about their own mean, sums do not tell which samples came first and gave the pivot.
            self.move_pivot_(self.mean.to(self.kept).double())
        self._sums = narrowed(self._sums, self.kept)
        self._fill_lower_()
        return self

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
        return self._of_each(lambda part: part.to(device, copy=copy))

    def move_pivot_(self, pivot: Tensor) -> Moments:
        """The same sums about another pivot, in place."""
        step = self.pivot - pivot
        add_step_(self._sums, self.n, self.total, step, +1)
        self._total = self.total + self.n * step
        self._pivot, self._is_shifted = pivot, True
        return self

    def group(self, index: int) -> Moments:
        """The moments of one group of a grouped layer."""
        return self._of_each(lambda part: part[index])

    def reordered(self, order: Tensor) -> Moments:
        """The same with the features in another order, given by their places now."""
        gram = self.open_sums["gram"][..., order, :][..., order]
        return self._of(self.n, self.pivot[..., order], self.total[..., order], {"gram": gram}, self.kept)

    def __repr__(self) -> str:
        shape = "empty" if self.n == 0 else f"features={tuple(self._pivot.shape)}"
        return f"Moments(n={self.n}, {shape})"

    def _start(self, rows: Tensor) -> None:
        self.kept = torch.promote_types(rows.dtype, torch.float32)
        pivot, shifts = pivot_near(rows, self._given)
        self._is_shifted = rows.dtype == self.kept or bool(shifts)
        self._pivot = pivot.double()
        self._total = torch.zeros_like(self._pivot)
        self._start_squares(torch.float64 if rows.device.type == "cpu" else self.kept)

    def _start_squares(self, counted: torch.dtype) -> None:
        self._is_exact = is_exact(self._pivot.shape[-1], self._pivot.device)
        gram = torch.zeros(*self._pivot.shape, self._pivot.shape[-1], dtype=counted, device=self._pivot.device)
        self._sums = {"gram": gram}

    def _fill_lower_(self) -> None:
        if not self._symmetric:
            fill_lower_(self._sums["gram"])
            self._symmetric = True

    def _add_squares_(self, shifted: Tensor) -> None:
        add_gram_(self._sums["gram"], shifted)
        self._symmetric = False

    def _of(self, n: float, pivot: Tensor, total: Tensor, sums: Sums, kept: torch.dtype) -> Moments:
        """Moments of the same kind from sums about a pivot."""
        return Moments.build(n, pivot, total, **sums, kept=kept)

    def _of_each(self, change: Callable[[Tensor], Tensor]) -> Moments:
        """The same with each of its tensors changed."""
        sums = {name: change(part) for name, part in self.open_sums.items()}
        return self._of(self.n, change(self.pivot), change(self.total), sums, self.kept)

    def _joined(self, other: Moments, sign: int) -> Moments:
        """The sums of both about this one's pivot, those of the other added or taken away."""
        if self.pivot.shape != other.pivot.shape:
            raise StatisticsError(
                f"moments of {tuple(self.pivot.shape)} and {tuple(other.pivot.shape)} features do not combine."
            )
        sums, step = combined(self.open_sums, other.open_sums, sign), other.pivot - self.pivot
        add_step_(sums, other.n, other.total, step, sign)
        total = self.total + sign * (other.total + other.n * step)
        kept = torch.promote_types(self.kept, other.kept)
        return self._of(self.n + sign * other.n, self.pivot, total, sums, kept)

    def _check_counted(self) -> None:
        if self.n == 0:
            raise StatisticsError("these moments have counted no rows yet.")
