"""Whether a request can work: separable, entangled or instance-like, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unmerge.collecting.collection import View
from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import Forward, Mask
from unmerge.diagnosing.separability import (
    Control,
    Separability,
    control_separability,
    mean_separability,
    mean_shift,
    random_control,
    separability,
)
from unmerge.linalg.products import full_precision
from unmerge.requests.request import Request
from unmerge.solving.pooling import pools_as_counted, pools_of

SEPARABLE_RATIO = 2.0  # S over a random subset's that none of 32 random draws of digits reached (the paper's: 2.4)
ENTANGLED_RATIO = 1.5  # below which even a set that differs from the rest shares its directions
RANDOM_SHIFT = 5.0  # mean shift over that of a random draw; random ones have 0.4 to 2.3, halves of a class 18 and more
SMALL_SCORE = 0.02  # below which nearly nothing of the request is outside the retain span

_SENTENCES = {
    "separable": "The forget set has directions of its own in the edited layers, so an edit can remove it and leave "
    "the rest.",
    "entangled": "The forget set shares most of its directions with what is retained: an edit will cost retain "
    "accuracy. Look at forget and retain accuracy against alpha before using it.",
    "instance-like": "The forget samples have nothing in common that the rest lacks, as a random subset would not: "
    "there is no concept to remove, and an edit lowers forget and retain accuracy alike.",
}


@dataclass(frozen=True)
class Verdict:
    """A word, its sentence, and the numbers that led to it."""

    kind: str  # "separable", "entangled" or "instance-like"
    sentence: str
    separability: float  # S over the edited layers that a control has reached
    control: float | None  # S of a random subset of the same size
    ratio: float | None
    shift: float  # largest mean shift of a layer, in units of what a random draw would show

    def __str__(self) -> str:
        if self.ratio is not None:
            numbers = f"S = {self.separability:.3f}, {self.ratio:.1f} times a random subset's {self.control:.3f}"
        else:
            numbers = f"S = {self.separability:.3f}, not calibrated: pass control= for a random subset's"
        return f"{self.kind} ({numbers}; mean shift {self.shift:.3g} times a random draw's).\n{self.sentence}"


def verdict_of(
    layers: Mapping[str, Separability],
    control: Mapping[str, Separability] | None,
    mean_shifts: Mapping[str, float],
    samples: int,
    expected: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict on a request of this many samples, from the layers that would be edited.

    S is compared in the layers that the control has reached: it may miss those of experts.
    expected: the mean shifts that a random draw shows, in layers where samples have many rows.
    """
    score = mean_separability(layers[name] for name in control or layers)
    random = mean_separability(control.values()) if control else None
    ratio = None if random is None else score / max(random, 1e-12)
    expected = expected or {}
    # The mean of n random rows is off by about 1/n of the variance.
    shift = max(found / expected[name] if name in expected else samples * found for name, found in mean_shifts.items())
    is_small = score < SMALL_SCORE  # which the ratio of two small numbers does not mend
    if shift < RANDOM_SHIFT and (ratio is None or ratio < SEPARABLE_RATIO or is_small):
        kind = "instance-like"
    elif is_small or (ratio is not None and ratio < ENTANGLED_RATIO):
        kind = "entangled"
    else:
        kind = "separable"
    return Verdict(kind, _SENTENCES[kind], score, random, ratio, shift)


@dataclass
class Evidence:
    """What a verdict rests on, gathered layer by layer."""

    layers: dict[str, Separability] = field(default_factory=dict)
    control: dict[str, Separability] = field(default_factory=dict)
    shifts: dict[str, float] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)  # shifts of a random draw
    samples: int = 0

    def add(
        self,
        model: nn.Module,
        request: Request,
        layers: Iterable[str],
        retain: Iterable[Any] | Statistics | None,
        seed: int,
        mask: Mask = None,
        forward: Forward | None = None,
        view: View | None = None,
    ) -> Evidence:
        """Measure some layers, beside a random control where retain can be read again."""
        assert request.forget is not None
        self.samples = request.forget.samples
        control: Control | None = None
        is_single = request.statistics.samples == 1  # which leaves none for a control
        if retain is not None and not isinstance(retain, (Statistics, Iterator)) and not is_single:
            options = {"mask": mask, "forward": forward, "seed": seed}
            control = random_control(model, retain, request, options, view)
            self.expected |= control.shifts
        known: dict[tuple[int, ...], str] = {}  # layers that share their input have the same numbers
        with full_precision(), torch.no_grad():
            for name in layers:
                same = known.setdefault(request.input_key(name), name)
                if same == name:
                    self._measure(request, control, name)
                self.layers[name], self.shifts[name] = self.layers[same], self.shifts[same]
                if same in self.control:
                    self.control[name] = self.control[same]
        return self

    def _measure(self, request: Request, control: Control | None, name: str) -> None:
        self.layers[name] = separability(pools_of(request, name))
        self.shifts[name] = mean_shift(pools_as_counted(request, name))
        if control is not None and name in control.statistics.layers:
            self.control[name] = control_separability(request, control.statistics, name)

    def verdict(self) -> Verdict:
        return verdict_of(self.layers, self.control, self.shifts, self.samples, self.expected)
