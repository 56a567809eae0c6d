"""The sum and the difference of two statistics, layer by layer and class by class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.sums.moments import Moments

if TYPE_CHECKING:
    from unmerge.collecting.statistics import Statistics


def combined(one: Statistics, other: Statistics, classes: tuple[int, ...], sign: int) -> Statistics:
    """one + sign · other, with what is kept of these classes; layers that share their value in both share it here."""
    other = other.beside(one).sketched(one.sketches)
    one = one.sketched(other.sketches)
    counts = dict.fromkeys(classes, 0)
    for owner, times in ((one, 1), (other, sign)):
        for label, count in zip(owner.classes, owner.class_samples, strict=True):
            if label in counts:
                counts[label] += times * count
    left = tuple(label for label in classes if counts[label] > 0)
    moves = [_moves(owner.classes, left) for owner in (one, other)]
    # Once a device, not once a layer: on a GPU each costs more than what it is for.
    devices = {layer.device for layer in one.layers.values()}
    placed = {device: [move.to(device) for move in moves] for device in devices}
    done: dict[tuple[int, int], LayerStatistics] = {}
    layers = {}
    for name, mine in one.layers.items():
        key = (id(mine), id(other.layers[name]))
        if key not in done:
            done[key] = _layer(one, other, name, left, placed[mine.device], sign)
        layers[name] = done[key]
    return dataclasses.replace(
        one,
        layers=layers,
        samples=one.samples + sign * other.samples,
        classes=left,
        class_samples=tuple(counts[label] for label in left),
        counted=one.counted if one.counted == other.counted else None,
    )


def _layer(
    one: Statistics, other: Statistics, name: str, classes: tuple[int, ...], moves: list[Tensor], sign: int
) -> LayerStatistics:
    mine, theirs = one.layers[name], other.layers[name]
    joined = LayerStatistics(mine.moments + theirs.moments if sign > 0 else mine.moments - theirs.moments)
    if classes:
        joined.class_rows = mine.class_rows.new_zeros(len(classes))
        joined.class_sums = mine.class_sums.new_zeros(len(classes), *mine.class_sums.shape[1:])
        for layer, (here, there), times in zip((mine, theirs), moves, (1, sign), strict=True):
            joined.class_rows.index_add_(0, there, layer.class_rows[here], alpha=times)
            joined.class_sums.index_add_(0, there, layer.class_sums[here], alpha=times)
    if sign > 0 and mine.class_moments and theirs.class_moments:
        for owner, layer in ((one, mine), (other, theirs)):
            for code, moments in layer.class_moments.items():
                place = classes.index(owner.classes[code])
                joined.class_moments[place] = joined.class_moments.get(place, Moments()) + moments
    return joined


def _moves(own: Sequence[int], classes: Sequence[int]) -> Tensor:
    """(2, n): where each of its own labels stands, and where that is among the classes; others are left behind."""
    place_of = {label: place for place, label in enumerate(classes)}
    found = [(place, place_of[label]) for place, label in enumerate(own) if label in place_of]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2).mT
