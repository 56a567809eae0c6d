"""The few directions of which the sketches of a layer know: in their coordinates its problem is one of a narrow layer.

The scatter W of one side within its classes is approximated by Ŵ = Y (ΩᵀY)⁺ Yᵀ with Y = WΩ (Nyström), which lies below
W and leaves a rest R with RΩ = 0 whose trace is known; the rest is taken to be the same in all directions outside Ω.
Class means are exact. So scatters, with or without what lies between classes, stay positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.linalg.orthonormal import NEGLIGIBLE, NOISE
from unmerge.linalg.products import full_precision
from unmerge.requests.request import Request
from unmerge.sums.moments import Moments
from unmerge.sums.sketching import SketchedMoments

_BLOCK = 1 << 17  # float64 numbers of a block, or more where a matrix is large
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Coordinates:
    """An orthonormal span of all that is known of a layer's inputs, and the sketch that it comes from."""

    span: Tensor  # (in, few)
    signs: Tensor  # Ω
    outside: Tensor  # (few, few): the projection on what is orthogonal to Ω
    shares: Mapping[str, float] = field(default_factory=dict)  # of each side's variance, that the span holds

    @classmethod
    def of(cls, sides: Sequence[LayerStatistics], means: Sequence[LayerStatistics]) -> Coordinates:
        """The span of the sketches of some statistics and of the means of others."""
        signs = _sketch_of(sides[0].moments).signs
        with full_precision():
            shifts = _unit_columns(_mean_shifts(means))
            widths = [signs.shape[1]] * len(sides) + [shifts.shape[1]]
            columns = signs.new_empty(len(signs), sum(widths))
            *places, last = columns.split(widths, dim=1)
            last.copy_(shifts)
            for place, side in zip(places, sides, strict=True):
                place.copy_(_sketch_of(side.moments).scatter_product(_between(side)))
                place.div_(place.norm().clamp_min(torch.finfo(place.dtype).tiny))
            span = _orthonormal_(columns)
            inner, cross = _crossed(signs, signs), _crossed(signs, span)
            outside = torch.eye(span.shape[1]).to(inner) - cross.mT @ torch.linalg.solve(inner, cross)
        return cls(span, signs, outside)

    @property
    def facts(self) -> dict[str, float]:
        """What an edit says of them."""
        return {"size": self.signs.shape[1]} | {side: round(share, 4) for side, share in self.shares.items()}

    def ridge(self, ridge: float) -> float:
        """A ridge relative to the mean eigenvalue of all inputs, relative to that of the coordinates."""
        features, few = self.span.shape
        kept = next(iter(self.shares.values()))
        return ridge * few / features / max(kept, torch.finfo(torch.float64).eps)

    def lifted(self, coordinates: Tensor) -> Tensor:
        """Columns of coordinates as columns of inputs."""
        found = coordinates.new_empty(len(self.span), coordinates.shape[1])
        for rows in _row_blocks(self.span):
            found[rows] = self.span[rows].double() @ coordinates
        return found

    def reduced(self, layer: LayerStatistics) -> tuple[LayerStatistics, float]:
        """The statistics of a layer in these coordinates, and the share of its variance that they hold."""
        with full_precision():
            moments, share = self._moments(layer.moments, _between(layer))
            parts = {code: self._moments(part, None)[0] for code, part in layer.class_moments.items()}
            sums = self._of_rows(layer.class_sums) if len(layer.class_sums) else layer.class_sums
            sample = None if layer.sample is None else self._of_rows(layer.sample).to(layer.sample.dtype)
        return replace(layer, moments=moments, class_sums=sums, class_moments=parts, sample=sample), share

    def _moments(self, known: Moments, between: Tensor | None) -> tuple[Moments, float]:
        moments = _sketch_of(known)
        sketch = moments.scatter_product(between)
        core = _crossed(self.signs, sketch)
        values, vectors = torch.linalg.eigh((core + core.mT) / 2)
        kept = values > NOISE[sketch.dtype] * values[-1].clamp_min(_TINY)
        factor = _crossed(self.span, sketch) @ (vectors[:, kept] * values[kept].rsqrt())
        scatter = factor @ factor.mT
        trace = moments.n * moments.variance.sum()
        inside = trace if between is None else trace - between.square().sum()
        features, size = self.signs.shape
        rest = (inside - scatter.diagonal().sum()).clamp_min(0) / (features - size)
        scatter += rest * self.outside
        if between is not None:
            shifts = self._of_rows(between)
            scatter += shifts.mT @ shifts
        mean = self._of_rows(moments.mean.unsqueeze(0))[0]
        share = (scatter.diagonal().sum() / trace.clamp_min(_TINY)).clamp_max(1)
        return Moments.build(moments.n, mean, torch.zeros_like(mean), scatter.to(sketch.dtype)), share.item()

    def _of_rows(self, rows: Tensor) -> Tensor:
        """The coordinates of inputs (n, in)."""
        return _crossed(rows.mT, self.span)


def in_coordinates(request: Request, layer: str) -> tuple[Request, Coordinates]:
    """The request of one sketched layer as that of a narrow one, and what its coordinates are."""
    named = {"all": request.whole, "retain": request.retain, "forget": request.forget}
    sides = {name: part[layer] for name, part in named.items() if part is not None}
    probes = [part[layer] for part in (request.probe_forget, request.probe_retain) if part is not None]
    found = Coordinates.of(list(sides.values()), [*sides.values(), *probes])
    reduced = {id(side): found.reduced(side) for side in (*sides.values(), *probes)}
    shares = {name: reduced[id(side)][1] for name, side in sides.items()}
    here = request.only(layer).with_each(lambda part: replace(part, layers={layer: reduced[id(part[layer])][0]}))
    return here, replace(found, shares=shares)


def _sketch_of(moments: Moments) -> SketchedMoments:
    assert isinstance(moments, SketchedMoments)
    return moments


def _between(layer: LayerStatistics) -> Tensor | None:
    """√n_c (m_c − m), one row a class that has rows, where there are labels."""
    if not len(layer.class_rows):
        return None
    rows = layer.class_rows.unsqueeze(1)
    shifts = layer.class_sums / rows.clamp_min(1) - layer.moments.mean
    return (shifts * rows.sqrt())[layer.class_rows > 0]


def _mean_shifts(sides: Sequence[LayerStatistics]) -> Tensor:
    """As columns the mean of the first side, and how far all other means are from it."""
    centre = sides[0].moments.mean
    rows = [centre.unsqueeze(0)]
    for side in sides:
        rows.append((side.moments.mean - centre).unsqueeze(0))
        seen = side.class_rows > 0
        if len(seen):
            rows.append(side.class_sums[seen] / side.class_rows[seen].unsqueeze(1) - centre)
    return torch.cat(rows).mT


def _unit_columns(columns: Tensor) -> Tensor:
    """The columns at length 1, but for those that are rounding."""
    sizes = columns.norm(dim=0)
    kept = sizes > NEGLIGIBLE**2 * sizes.max()
    return columns[:, kept] / sizes[kept]


def _orthonormal_(columns: Tensor) -> Tensor:
    """An orthonormal basis of the span of some columns, in their place."""
    values, vectors = torch.linalg.eigh(_crossed(columns, columns))
    kept = values > NEGLIGIBLE**2 * values[-1]
    columns = _turned_(columns, vectors[:, kept] * values[kept].rsqrt())
    # Once more, since their Gram resolves the smallest of them less well than the columns do.
    factor = torch.linalg.cholesky(_crossed(columns, columns))
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return _turned_(columns, torch.linalg.solve_triangular(factor, identity, upper=False).mT)


def _turned_(columns: Tensor, rotation: Tensor) -> Tensor:
    """columns · rotation in the place of the columns."""
    for rows in _row_blocks(columns):
        columns[rows, : rotation.shape[1]] = (columns[rows].double() @ rotation).to(columns.dtype)
    return columns[:, : rotation.shape[1]]


def _crossed(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ · right in float64."""
    found = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for rows in _row_blocks(left, right):
        found.addmm_(left[rows].double().mT, right[rows].double())
    return found


def _row_blocks(*matrices: Tensor) -> Iterator[slice]:
    """Rows of which float64 copies take little beside the matrices."""
    features = len(matrices[0])
    height = max(_BLOCK // max(1, *(matrix.shape[1] for matrix in matrices)), features // 16, 1)
    yield from (slice(start, start + height) for start in range(0, features, height))
