"""Whether a request can work: separable, entangled or instance-like, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unmerge.batches import Forward, Mask
from unmerge.moments import full_precision
from unmerge.request import Request
from unmerge.separability import (
    Separability,
    control_request,
    mean_separability,
    mean_shift,
    random_control,
    separability,
)
from unmerge.statistics import Statistics

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
    separability: float  # S over the edited layers
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
) -> Verdict:
    """The verdict on a request of this many samples, from the layers that would be edited."""
    score = mean_separability(layers.values())
    random = None if control is None else mean_separability(control.values())
    ratio = None if random is None else score / max(random, 1e-12)
    # The mean of n random samples is off by about 1/n of the variance.
    shift = samples * max(mean_shifts.values())
    differs = shift >= RANDOM_SHIFT
    if not differs and (ratio is None or ratio < SEPARABLE_RATIO):
        kind = "instance-like"
    elif score < SMALL_SCORE or (ratio is not None and ratio < ENTANGLED_RATIO):
        kind = "entangled"
    else:
        kind = "separable"
    return Verdict(kind, _SENTENCES[kind], score, random, ratio, shift)


def judge(
    model: nn.Module,
    request: Request,
    layers: Iterable[str],
    retain: Iterable[Any] | Statistics | None,
    seed: int,
    mask: Mask = None,
    forward: Forward | None = None,
) -> Verdict:
    """The verdict on a request for some samples, beside a random control where retain can be read again."""
    layers = list(layers)
    others = None
    is_single = request.statistics.samples == 1  # which leaves none for a control
    if retain is not None and not isinstance(retain, (Statistics, Iterator)) and not is_single:
        control = random_control(model, retain, request, {"mask": mask, "forward": forward, "seed": seed})
        others = control_request(request, control)
    forget = request.forget
    assert forget is not None
    with full_precision(), torch.no_grad():
        return verdict_of(
            {name: separability(request.pools(name)) for name in layers},
            None if others is None else {name: separability(others.pools(name)) for name in layers},
            {name: mean_shift(request.pools(name)) for name in layers},
            forget.samples,
        )
