"""Running statistics of one layer's inputs over a pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from unmerge.collecting.batch_facts import BatchFacts
from unmerge.collecting.unfolding import can_be_taps_first, channels_first, chunks
from unmerge.errors import DataError
from unmerge.linalg.products import is_exact
from unmerge.sums import shifts
from unmerge.sums.moments import Moments
from unmerge.sums.sampling import Drawn, Reservoir
from unmerge.sums.sketching import SketchedMoments, sketched


@dataclass(frozen=True)
class Keep:
    """What is kept beyond moments and class sums."""

    full: bool = False  # the full moments of each class
    sample: int = 0  # this many rows
    max_points: int | None = None  # count only the first rows
    seed: int = 0


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@dataclass
class LayerStatistics:
    """All that one layer's inputs leave behind."""

    moments: Moments
    class_rows: Tensor = field(default_factory=_nothing)  # of each class, empty without labels
    class_sums: Tensor = field(default_factory=_nothing)  # Σx of each class, (classes, ..., features), float64
    class_moments: dict[int, Moments] = field(default_factory=dict)  # by place of the class
    sample: Tensor | None = None  # some rows, drawn at random

    @property
    def device(self) -> torch.device:
        return self.moments.total.device

    @property
    def groups(self) -> int | None:
        """How many groups of inputs a grouped layer has; None for others."""
        return len(self.moments.total) if self.moments.total.dim() == 2 else None

    @property
    def sketch(self) -> int | None:
        """The size of the sketch that stands for the Gram, where one does."""
        return self.moments.size if isinstance(self.moments, SketchedMoments) else None

    def sketched(self, size: int) -> LayerStatistics:
        """These statistics with sketches of at most this size."""
        parts = {code: sketched(moments, size) for code, moments in self.class_moments.items()}
        return replace(self, moments=sketched(self.moments, size), class_moments=parts)

    def settle_(self) -> LayerStatistics:
        """Narrow all sums to the type in which they are kept: all rows are counted."""
        for moments in (self.moments, *self.class_moments.values()):
            moments.settle_()
        return self

    def reordered(self, order: Tensor) -> LayerStatistics:
        """The same with the features in another order, given by their places now."""
        order = order.to(self.device)
        return LayerStatistics(
            self.moments.reordered(order),
            self.class_rows,
            self.class_sums[:, order] if len(self.class_sums) else self.class_sums,
            {code: moments.reordered(order) for code, moments in self.class_moments.items()},
            None if self.sample is None else self.sample[..., order],
        )

    def to(self, device: torch.device | str) -> LayerStatistics:
        return LayerStatistics(
            self.moments.to(device),
            self.class_rows.to(device),
            self.class_sums.to(device),
            {code: moments.to(device) for code, moments in self.class_moments.items()},
            None if self.sample is None else self.sample.to(device),
        )


def of_classes(moments: dict[int, Moments], classes: int) -> LayerStatistics:
    """The statistics that follow from the full moments of each class, by place among so many classes."""
    first, *others = moments.values()
    result = LayerStatistics(reduce(add, others, first), class_moments=moments)
    result.class_rows = torch.zeros(classes, dtype=torch.float64, device=first.mean.device)
    result.class_sums = result.class_rows.new_zeros(classes, *first.mean.shape)
    for place, part in moments.items():
        result.class_rows[place] = part.n
        result.class_sums[place] = part.n * part.mean
    return result


class Accumulator:
    """Takes a layer's inputs batch by batch and ends as `LayerStatistics`, sketched where a size is given.

    pivot: as `Probe.pivots` has it, the same in every process; without one the first inputs give it.
    """

    def __init__(
        self, module: nn.Module, labelled: bool, keep: Keep, sketch: int | None = None, pivot: Tensor | None = None
    ) -> None:
        self._module, self._sketch = module, sketch
        self._pivot = None if pivot is None else pivot.cpu()  # where looking at it makes nobody wait
        self._labelled, self._full, self._max_points = labelled, keep.full, keep.max_points
        self._parts: dict[int, Moments | shifts.ShiftedMoments] = {}  # one a class when full, else one
        self._rows = 0
        self._class_sums, self._class_rows = _nothing(), _nothing()
        self._reservoir = Reservoir(keep.sample, keep.seed) if keep.sample else None
        self._by_shift: bool | None = None
        self._order: Tensor | None = None  # where the features of the weight stand, if these are counted taps first
        self._signs: Tensor | None = None  # those of a sketch, held so that they are not made anew for each batch

    @property
    def is_full(self) -> bool:
        return self._max_points is not None and self._rows >= self._max_points

    @property
    def is_empty(self) -> bool:
        return not any(part.n for part in self._parts.values())

    def witness(self) -> Tensor:
        """A number that is finite where all that was counted is, as a tensor, so that asking for it needs no wait."""
        counted = [part.witness() for part in self._parts.values() if part.n]
        return reduce(torch.maximum, counted) if counted else torch.zeros((), dtype=torch.float64)

    def add(self, inputs: Tensor, facts: BatchFacts) -> None:
        if inputs.numel() == 0:  # an expert that is called without a token
            return
        if self._by_shift is None:
            bounded = self._reservoir is not None or self._max_points is not None or facts.counting is not None
            bounded = bounded or self._sketch is not None
            self._by_shift = not bounded and self._is_summed_by_shift(inputs)
            if not self._by_shift and self._sketch is None and can_be_taps_first(self._module, inputs):
                self._order = channels_first(self._module)
        if self._by_shift:
            self._add_by_shift(inputs, facts)
        else:
            self._add_rows(inputs, facts)

    def finish(self) -> LayerStatistics:
        finished = {
            code: part.finish() if isinstance(part, shifts.ShiftedMoments) else part
            for code, part in sorted(self._parts.items())
        }
        if self._labelled and self._full:
            result = of_classes(finished, max(finished) + 1)
        else:
            result = LayerStatistics(next(iter(finished.values())), self._class_rows, self._class_sums)
        if self._reservoir is not None:
            result.sample = self._reservoir.rows
        return result if self._order is None else result.reordered(self._order)

    @property
    def drawn(self) -> Drawn | None:
        """How the rows of the sample were drawn, where there is one."""
        return None if self._reservoir is None else self._reservoir.drawn

    def _add_by_shift(self, inputs: Tensor, facts: BatchFacts) -> None:
        codes = self._codes(facts, len(inputs))
        for code, chosen in self._split(facts, codes):
            part = self._parts.setdefault(code, shifts.ShiftedMoments())
            assert isinstance(part, shifts.ShiftedMoments)
            sums = part.update(inputs if chosen is None else inputs[chosen])
            if codes is not None and not self._full:
                places = inputs.shape[-2] * inputs.shape[-1]
                self._add_class_sums(sums, sums.new_full((len(inputs),), places), codes, facts.classes)

    def _add_rows(self, inputs: Tensor, facts: BatchFacts) -> None:
        for part, rows in chunks(self._module, inputs, self._order is not None):
            samples, places = rows.shape[-3:-1]
            codes = self._codes(facts, len(inputs) if inputs.dim() > 1 else 1)
            codes = None if codes is None else codes[part]
            keep, kept_rows = facts.kept(part, len(inputs), places)
            flat = rows.flatten(-3, -2)
            row_codes = codes.repeat_interleave(places) if codes is not None and self._full else None
            if kept_rows is not None:
                flat = flat[..., kept_rows, :]
                row_codes = None if row_codes is None else row_codes[kept_rows]
            if self._max_points is not None:
                flat = flat[..., : self._max_points - self._rows, :]
                row_codes = None if row_codes is None else row_codes[: flat.shape[-2]]
            self._rows += flat.shape[-2]
            row_sum = None
            if codes is not None and not self._full:
                kept = rows if keep is None else rows.masked_fill(~keep.unsqueeze(-1), 0)
                exact = rows.dtype == torch.float64 or is_exact(rows.shape[-1], rows.device)
                wide = torch.float64 if exact else torch.float32
                sums = kept.sum(-2, dtype=wide)
                counts = sums.new_full((samples,), places) if keep is None else keep.sum(1)
                self._add_class_sums(sums if sums.dim() == 2 else sums.transpose(0, 1), counts, codes, facts.classes)
                row_sum = sums.sum(-2, dtype=torch.float64) if self._max_points is None else None
            for code, chosen in self._split(facts, row_codes):
                if code not in self._parts:
                    self._parts[code] = self._nothing_yet()
                moments = self._parts[code]
                assert isinstance(moments, Moments)
                moments.update(flat if chosen is None else flat[..., chosen, :], row_sum)
                if isinstance(moments, SketchedMoments):
                    self._signs = moments.signs
            if self._reservoir is not None:
                self._reservoir.offer(flat, facts.number)

    def _nothing_yet(self) -> Moments:
        if self._sketch is not None:
            return SketchedMoments(self._sketch, self._pivot)
        if self._order is None or self._pivot is None:
            return Moments(self._pivot)
        return Moments(self._pivot[self._order.argsort()])

    def _is_summed_by_shift(self, inputs: Tensor) -> bool:
        if self._pivot is None:
            return shifts.applies(self._module, inputs)
        return shifts.fits(self._module, inputs) and not self._pivot.any()

    def _split(self, facts: BatchFacts, codes: Tensor | None) -> list[tuple[int, Tensor | None]]:
        """The parts that a batch's rows go to: all to one, or each class to its own."""
        if codes is None or not self._full:
            return [(0, None)]
        return [(code, chosen) for code in facts.present if len(chosen := (codes == code).nonzero()[:, 0])]

    def _codes(self, facts: BatchFacts, leading: int) -> Tensor | None:
        if not self._labelled or facts.codes is None:
            return None
        if leading % facts.size:
            raise DataError(
                f"a layer received {leading} rows for {facts.size} samples, so they cannot be assigned to labels."
            )
        repeats = leading // facts.size
        return facts.codes if repeats == 1 else facts.codes.repeat_interleave(repeats)

    def _add_class_sums(self, sums: Tensor, counts: Tensor, codes: Tensor, classes: int) -> None:
        known = len(self._class_sums)
        if classes > known:
            grown = torch.zeros(classes, *sums.shape[1:], dtype=torch.float64, device=sums.device)
            rows = torch.zeros(classes, dtype=torch.float64, device=sums.device)
            if known:
                grown[:known], rows[:known] = self._class_sums, self._class_rows
            self._class_sums, self._class_rows = grown, rows
        self._class_sums.index_add_(0, codes, sums.double())
        self._class_rows.index_add_(0, codes, counts.double())
