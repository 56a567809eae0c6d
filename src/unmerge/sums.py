"""The sum and the difference of two statistics, layer by layer and class by class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmerge.accumulation import LayerStatistics
from unmerge.moments import Moments

if TYPE_CHECKING:
    from unmerge.statistics import Statistics


def combined(one: Statistics, other: Statistics, classes: tuple[int, ...], sign: int) -> Statistics:
    """one + sign · other, with what is kept of these classes; layers that share their value in both share it here."""
    other = other.beside(one).sketched(one.sketches)
    one = one.sketched(other.sketches)
    done: dict[tuple[int, int], LayerStatistics] = {}
    layers = {}
    for name, mine in one.layers.items():
        key = (id(mine), id(other.layers[name]))
        if key not in done:
            done[key] = _layer(one, other, name, classes, sign)
        layers[name] = done[key]
    counts = dict.fromkeys(classes, 0)
    for owner, times in ((one, 1), (other, sign)):
        for label, count in zip(owner.classes, owner.class_samples, strict=True):
            if label in counts:
                counts[label] += times * count
    kept = [place for place, label in enumerate(classes) if counts[label] > 0]
    if classes:
        for layer in done.values():
            layer.class_rows, layer.class_sums = layer.class_rows[kept], layer.class_sums[kept]
    return dataclasses.replace(
        one,
        layers=layers,
        samples=one.samples + sign * other.samples,
        classes=tuple(classes[place] for place in kept),
        class_samples=tuple(counts[classes[place]] for place in kept),
        counted=one.counted if one.counted == other.counted else None,
        parts=None,
        factors={},
    )


def _layer(one: Statistics, other: Statistics, name: str, classes: tuple[int, ...], sign: int) -> LayerStatistics:
    mine, theirs = one.layers[name], other.layers[name]
    joined = LayerStatistics(mine.moments + theirs.moments if sign > 0 else mine.moments - theirs.moments)
    if classes:
        joined.class_rows = _spread(mine.class_rows, one.classes, classes)
        joined.class_sums = _spread(mine.class_sums, one.classes, classes)
        joined.class_rows = joined.class_rows + sign * _spread(theirs.class_rows, other.classes, classes)
        joined.class_sums = joined.class_sums + sign * _spread(theirs.class_sums, other.classes, classes)
    if sign > 0 and mine.class_moments and theirs.class_moments:
        for owner, layer in ((one, mine), (other, theirs)):
            for code, moments in layer.class_moments.items():
                place = classes.index(owner.classes[code])
                joined.class_moments[place] = joined.class_moments.get(place, Moments()) + moments
    return joined


def _spread(values: Tensor, own: Sequence[int], classes: Sequence[int]) -> Tensor:
    """A class tensor in the order of other classes, zeros where it has none."""
    place_of = {label: place for place, label in enumerate(classes)}
    found = [(place_of[label], place) for place, label in enumerate(own) if label in place_of]
    there, here = torch.tensor(found, dtype=torch.int64, device=values.device).reshape(-1, 2).unbind(1)
    return values.new_zeros(len(classes), *values.shape[1:]).index_copy_(0, there, values[here])
