"""How much of a forget set lies outside what is retained: S = fvar · (1 − overlap), and what a random subset has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.collecting.collection import View, collect, view_of
from unmerge.collecting.statistics import Statistics
from unmerge.data.chosen import ChosenSamples
from unmerge.diagnosing import geometry
from unmerge.diagnosing.scatters import Scatter
from unmerge.errors import StatisticsError
from unmerge.linalg.eigen import top_eigenpairs
from unmerge.linalg.orthonormal import NOISE
from unmerge.planning.costs import CONTROL_GROUPS
from unmerge.requests.request import Request
from unmerge.solving.pooling import pools_of
from unmerge.solving.pools import Pools
from unmerge.sums.moments import Moments

RANK = 16  # of the PCA bases, whatever the recipe: S depends on the basis
_STEPS = 11  # of their iteration: the noise of a flat spectrum has no directions that S would need
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Separability:
    """Captured forget variance and overlap with the retain span, of one layer or as the mean of several."""

    captured: float
    overlap: float

    @property
    def score(self) -> float:
        return self.captured * (1 - self.overlap)


@dataclass(frozen=True)
class Control:
    """As many random retain samples as are to be forgotten, and what such a draw shows."""

    statistics: Statistics
    shifts: Mapping[str, float]  # the mean shift to expect of it, in layers of which a sample has many rows


def rank_for(features: int) -> int:
    """At most a quarter of a narrow input, of which any sixteen directions would be nearly all."""
    return min(RANK, max(1, features // 4))


def separability(groups: list[Pools]) -> Separability:
    """The separability of one layer, averaged over its groups."""
    return _mean([_of_group(pools, Scatter.of(pools.retain)) for pools in groups])


def control_separability(request: Request, control: Statistics, layer: str) -> Separability:
    """The separability of one layer with a control in the place of the forget set, and all else retained."""
    request, control = request.only(layer), control.only(layer)
    if request.statistics.sketches or control.sketches:
        return separability(pools_of(_with_control(request, control), layer))
    # From the parts, since statistics of all else would take several Grams more.
    drawn = pools_of(replace(request, forget=control.beside(request.statistics)), layer)
    parts = []
    for pools, others in zip(drawn, pools_of(request, layer), strict=True):
        rest = Scatter.of(others.forget) + Scatter.of(others.retain) - Scatter.of(pools.forget)
        parts.append(_of_group(pools, rest.in_one()))
    return _mean(parts)


def _with_control(request: Request, control: Statistics) -> Request:
    """The control in the place of the forget set, and all else retained."""
    forget, retain = request.forget, request.retain
    assert forget is not None
    assert retain is not None
    # Labels do not matter here, and may be given for one part only.
    joint, control = forget.without_classes() + retain.without_classes(), control.without_classes()
    return Request(control, joint - control)


def _of_group(pools: Pools, retain: Scatter) -> Tensor:
    """Captured variance and overlap of one group."""
    rank, forget = rank_for(pools.width), pools.forget
    values, forget_basis = _leading(Scatter.of(forget), rank, seed=0)
    _, retain_basis = _leading(retain, rank, seed=1)
    overlap = geometry.overlaps(forget_basis, retain_basis)
    share = values.sum() / (forget.n * forget.variance.sum()).clamp_min(_TINY)
    if pools.coordinates is not None:
        share = share * pools.coordinates.shares["forget"]
    return torch.stack([share, overlap.mean() if len(overlap) else share.new_ones(())])


def _leading(scatter: Scatter, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """The leading eigenvalues and eigenvectors, at most as many as have variance."""
    values, vectors = top_eigenpairs(scatter.__matmul__, rank, scatter.like, most=_STEPS, seed=seed)
    kept = (values > 0) & (values > NOISE[scatter.like.dtype] * values[:1])
    return values[kept], vectors[:, kept]


def _mean(parts: list[Tensor]) -> Separability:
    return Separability(*torch.stack(parts).mean(0).tolist())


def mean_separability(layers: Iterable[Separability]) -> float:
    """S over layers."""
    scores = [layer.score for layer in layers]
    return sum(scores) / len(scores)


def mean_shift(groups: list[Pools]) -> float:
    """‖m_F − m_R‖² as a share of the retain variance."""
    shifts = [
        ((pools.forget.mean - pools.retain_mean).square().sum() / pools.retain.variance.sum().clamp_min(_TINY)).item()
        for pools in groups
    ]
    return sum(shifts) / len(shifts)


def expected_shift(layer: LayerStatistics, retain: Moments) -> float:
    """The mean shift of random samples, from how far apart the means of their classes lie, dealt out at random.

    The tokens of a text are no independent draws: their number does not say it, and neither does that of the texts.
    """
    rows, count = layer.class_rows, len(layer.class_rows)
    mean = layer.class_sums.sum(0) / rows.sum()
    apart = (layer.class_sums - rows.unsqueeze(1) * mean).square().sum()
    return (apart * count / (count - 1) / rows.sum() ** 2 / retain.variance.sum().clamp_min(_TINY)).item()


def random_control(
    model: nn.Module,
    retain: Iterable[Any],
    request: Request,
    options: Mapping[str, Any],
    view: View | None = None,
) -> Control:
    """As many random retain samples as are to be forgotten; they may miss layers of experts."""
    generator = torch.Generator().manual_seed(options["seed"])
    places = torch.randperm(request.statistics.samples, generator=generator)[: _control_size(request)]
    data = ChosenSamples(retain, places.tolist(), groups=CONTROL_GROUPS)
    known = request.statistics
    view = view_of(model, known) if view is None else view.only(list(known.layers), with_left_out=False)
    # A layer that the control does not reach is edited all the same.
    view = replace(view, tells=False, selection=replace(view.selection, named=False))
    found = collect(model, data, view, **options, what="random control")
    is_dealt = len(found.classes) > 1 and max(found.classes) < 0
    layers = {name: layer for name, layer in found.layers.items() if is_dealt and layer.class_sums.dim() == 2}
    shifts = {name: expected_shift(layer, known[name].moments) for name, layer in layers.items()}
    return Control(found.without_classes(), {name: shift for name, shift in shifts.items() if shift > 0})


def check_control(request: Request, control: Statistics) -> None:
    """Refuse statistics that are not of as many of the request's samples as are to be forgotten."""
    expected = _control_size(request)
    if control.samples != expected:
        raise StatisticsError(
            f"the control has {control.samples} samples; expected {expected}, as many as are to be forgotten, since "
            "separability depends on their number."
        )
    known = request.statistics.leaving_out(control.left_out)
    control = control.leaving_out(request.statistics.left_out)
    known.check_alike(control, "compare")
    control = control.beside(known)
    for name, layer in known.layers.items():
        lost, kept, drawn = (
            _squares_about(layer.moments.mean, part[name].moments)
            for part in (request.forget, request.retain, control)
            if part is not None
        )
        if bool((lost + kept - drawn < -1e-3 * (lost + kept).amax(-1, keepdim=True)).any()):
            raise StatisticsError(
                f"the control's samples are not among those of the request: inputs of {name!r} vary more in it than in "
                "all of them. Draw it from retain."
            )


def _squares_about(centre: Tensor, moments: Moments) -> Tensor:
    """Σ(x − c)² of each input."""
    return moments.n * (moments.variance + (moments.mean - centre).square())


def _control_size(request: Request) -> int:
    assert request.forget is not None
    return min(request.forget.samples, request.statistics.samples - 1)
