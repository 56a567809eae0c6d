"""What is known of one layer's inputs in a request, in the form in which the bases ask for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.collecting.statistics import Statistics
from unmerge.errors import DataError, LayerError
from unmerge.linalg.eigen import top_eigenpairs
from unmerge.linalg.kmeans import kmeans
from unmerge.linalg.orthonormal import NEGLIGIBLE, NOISE
from unmerge.recipe import Recipe
from unmerge.requests.request import Request
from unmerge.solving.bases import ridged_factor
from unmerge.solving.coordinates import Coordinates
from unmerge.solving.whitened import WhitenedMeans
from unmerge.sums.moments import Moments

Kept = TypeVar("Kept")


class Pools:
    """The moments of one layer, or of one group of it, as the bases ask for them.

    Those of a sketched layer are in coordinates, of which `width` is not the number.
    """

    def __init__(self, request: Request, layer: str, group: int | None, coordinates: Coordinates | None = None) -> None:
        self._request, self._layer, self._group = request, layer, group
        self.coordinates = coordinates

    @property
    def width(self) -> int:
        """How many inputs there are."""
        return len(self.retain_mean if self.coordinates is None else self.coordinates.span)

    @property
    def _lost(self) -> Statistics:
        """Where the forgotten classes stand: the forget statistics, or those of everything."""
        return self._request.forget or self._request.statistics

    @property
    def _kept(self) -> Statistics:
        """Where the retained classes stand: the retain statistics, or those of everything."""
        return self._request.statistics

    def keeps_mean(self, recipe: Recipe) -> bool:
        """Whether the edit acts on x − m_R."""
        return self._request.keeps_mean(self._layer, recipe)

    @cached_property
    def retain_mean(self) -> Tensor:
        """m_R, exact in every kind of request."""
        if self._request.retain is not None:
            return self._moments(self._request.retain[self._layer].moments).mean
        rows, sums = self._class_sums(self._kept, forgotten=False)
        count = float(rows.sum())
        if not count:
            raise self._nothing_retained()
        return sums.sum(0) / count

    @cached_property
    def retain_scatter(self) -> Tensor:
        """S_R; from classes alone it also holds what the forgotten classes scatter about their means."""
        if self._request.retain is not None:
            return self._moments(self._request.retain[self._layer].moments).scatter
        rows, means = self._class_means(self._lost, forgotten=True)
        shifts = (means - self.retain_mean) * rows.sqrt().unsqueeze(1)
        scatter = self.joint.scatter_about(self.retain_mean)
        return scatter - (shifts.mT @ shifts).to(scatter.dtype)

    @property
    def retain_rows(self) -> float:
        """How many rows `retain_scatter` sums over."""
        return self._kept[self._layer].moments.n

    @property
    def forget(self) -> Moments:
        return self._moments(self._lost[self._layer].moments)

    @property
    def retain(self) -> Moments:
        return self._moments(self._kept[self._layer].moments)

    def shifts(self) -> tuple[Tensor, Tensor]:
        """The rows of each forgotten class and m_c − m_R, by ascending label; without labels the forget set is one."""
        rows, means = self._class_means(self._lost, forgotten=True)
        return rows, means - self.retain_mean

    @cached_property
    def class_shifts(self) -> Tensor:
        """m_c − m_R of the forgotten classes that have one.

        A class whose mean is the retain mean has no direction; rounding would make one up.
        """
        rows, shifts = self.shifts()
        return shifts[(rows > 0) & (shifts.norm(dim=1) > NEGLIGIBLE * self.joint.variance.sum().sqrt())]

    @property
    def noise(self) -> float:
        """The share of a sum of squares that is rounding, where its terms cancel."""
        return NOISE[self.forget.kept]

    @property
    def is_constant(self) -> bool:
        """Whether the inputs vary by no more than rounding, as those of a dead channel do."""

        def made() -> bool:
            sides = [self.joint] if self._request.joint is not None else [self.forget, self.retain]
            rows = sum(side.n for side in sides)
            mean = sum((side.n / rows * side.mean for side in sides), torch.zeros_like(sides[0].mean))
            apart = [side.n / rows * (side.variance + (side.mean - mean).square()).sum() for side in sides]
            rounding = 1e-6 if self.retain.kept == torch.float32 else 1e-12
            return bool(torch.stack(apart).sum().clamp_min(0).sqrt() <= rounding * mean.norm())

        return self._kept_with_joint(("constant",), made)

    def joint_factor(self, ridge: float) -> Tensor:
        """The factor of S's scatter with its ridge; what is made of it does not depend on its scale."""
        return self._kept_with_joint(("joint", ridge), lambda: ridged_factor(self.joint.scatter, ridge))

    def joint_basis(self, rank: int) -> Tensor | None:
        """The leading eigenvectors of S where its statistics are kept: those of the retain part are not far."""
        if self._request.joint is None:
            return None
        return self._kept_with_joint(("basis", rank), lambda: top_eigenpairs(self.joint.scatter, rank + 4)[1])

    def whitened_means(self, ridge: float) -> tuple[WhitenedMeans, list[int], list[int]]:
        """The class means of S as `private-mean` and `blend` see them, and the places of those forgotten and kept."""
        if not self._kept.classes:
            raise DataError(
                "basis='private-mean' and 'blend' need a class label with every retain sample, but there are none. "
                "Give batches as (inputs, labels), or use basis='lda'."
            )
        joint = self._request.joint
        if joint is not None and joint.classes and self._request.classes:
            # All means are those of whole classes of S, whatever the request.
            layer, labels = joint[self._layer], list[object](joint.classes)
            lost = [label in self._request.classes for label in joint.classes]
            sums = self._grouped(layer.class_sums)
            means = self._kept_with_joint(
                ("means", ridge), lambda: self._whitened(labels, layer.class_rows, sums, ridge)
            )
        else:
            sources = (self._lost, self._kept)
            names = [source.classes or (None,) for source in sources]
            found = [self._class_sums(source, forgotten=source is self._lost) for source in sources]
            labels = [label for own in names for label in own]
            lost = [True] * len(names[0]) + [False] * len(names[1])
            rows, sums = (torch.cat(parts) for parts in zip(*found, strict=True))
            means = self._whitened(labels, rows, sums, ridge)
        # A class without a row here (masked, or routed to other experts) has no mean.
        seen = [place for place, count in enumerate(means.rows.tolist()) if count > 0]
        kept = [place for place in seen if not lost[place]]
        if not kept:
            raise self._nothing_retained()
        return means, [place for place in seen if lost[place]], kept

    def _nothing_retained(self) -> LayerError:
        return LayerError(f"layer {self._layer!r} saw no row of a retained class. Leave it out with layers=...")

    def _whitened(self, labels: list[object], rows: Tensor, sums: Tensor, ridge: float) -> WhitenedMeans:
        """From the rows and Σx of each part of a class; parts with one label are of one class."""
        order = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        groups = torch.tensor([order[label] for label in labels], device=rows.device)
        shifts = (sums / rows.clamp_min(1).unsqueeze(1) - self.joint.mean) * (rows > 0).unsqueeze(1)
        weighted = torch.zeros(len(order), *shifts.shape[1:], dtype=torch.float64, device=rows.device)
        weighted.index_add_(0, groups, rows.unsqueeze(1) * shifts)
        counts = rows.new_zeros(len(order)).index_add_(0, groups, rows)
        between = weighted / counts.clamp_min(1).sqrt().unsqueeze(1)
        factor = ridged_factor(self.joint.scatter.double() - between.mT @ between, ridge)
        return WhitenedMeans.of(rows, groups, shifts, factor, self.joint.variance.sum().clamp_min(0).sqrt())

    def clusters(self, recipe: Recipe) -> tuple[list[Tensor], Tensor, Tensor]:
        """For CAV: each cluster's scatter about the pool's centre c, the rows n_j (m_j − c), and the retain scatter."""
        layer = (self._request.probe_forget or self._lost)[self._layer]
        retain = self._moments((self._request.probe_retain or self._kept)[self._layer].moments)
        if recipe.traits.keeps == "classes":
            parts = [self._moments(part) for part in layer.class_moments.values()]
        else:
            parts = self._kmeans(layer, recipe)
        pool = self._moments(layer.moments)
        centre = retain.mean if recipe.centering == "retain" else pool.mean
        spread = pool.variance.sum().sqrt()
        parts = [part for part in parts if (part.mean - centre).norm() > NEGLIGIBLE * spread]
        shifts = [part.n * (part.mean - centre) for part in parts]
        stacked = torch.stack(shifts) if shifts else retain.mean.new_zeros(0, len(retain.mean))
        return [part.scatter_about(centre) for part in parts], stacked, retain.scatter

    def _kmeans(self, layer: LayerStatistics, recipe: Recipe) -> list[Moments]:
        """Clusters of the kept rows, their counts and scatters scaled to stand for all rows."""
        assert layer.sample is not None
        rows = self._grouped(layer.sample, dim=0).double()
        assigned = kmeans(rows, recipe.rank, recipe.seed)
        parts = [Moments.of(rows[assigned == cluster]) for cluster in assigned.unique().tolist()]
        scale = layer.moments.n / len(rows)
        return [Moments.build(part.n * scale, part.mean, 0 * part.total, part.scatter * scale) for part in parts]

    @cached_property
    def joint(self) -> Moments:
        if self._request.joint is not None:
            return self._moments(self._request.joint[self._layer].moments)
        return self.forget + self._moments(self._kept[self._layer].moments)

    def _kept_with_joint(self, key: tuple[object, ...], make: Callable[[], Kept]) -> Kept:
        """A value that depends on S alone: its statistics serve many requests, so it is kept with them."""
        kept = self._request.joint.factors if self._request.joint is not None else {}
        place = (self._layer, self._group, *key)
        if place not in kept:
            kept[place] = make()
        return kept[place]

    def _class_means(self, source: Statistics, forgotten: bool) -> tuple[Tensor, Tensor]:
        """Rows and mean (0 without a row) of each class on one side of the request; without labels one class is all."""
        rows, sums = self._class_sums(source, forgotten)
        return rows, sums / rows.clamp_min(1).unsqueeze(1)

    def _class_sums(self, source: Statistics, forgotten: bool) -> tuple[Tensor, Tensor]:
        """Rows and Σx of each class on one side of the request."""
        layer = source[self._layer]
        if not source.classes:
            moments = self._moments(layer.moments)
            return moments.mean.new_tensor([moments.n]), (moments.n * moments.mean).unsqueeze(0)
        rows, sums = layer.class_rows, self._grouped(layer.class_sums)
        if source is not self._request.whole:
            return rows, sums
        places = _places(source.classes, self._request.classes, forgotten, rows.device)
        return rows[places], sums[places]

    def _moments(self, moments: Moments) -> Moments:
        return moments if self._group is None else moments.group(self._group)

    def _grouped(self, tensor: Tensor, dim: int = 1) -> Tensor:
        return tensor if self._group is None else tensor.select(dim, self._group)


@lru_cache(maxsize=8)
def _places(labels: tuple[int, ...], classes: tuple[int, ...], inside: bool, device: torch.device) -> Tensor:
    """Where the labels stand that are among some classes, or are not: the same in every layer of a request."""
    places = [place for place, label in enumerate(labels) if (label in classes) == inside]
    return torch.tensor(places, dtype=torch.int64, device=device)
