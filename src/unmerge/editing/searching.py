"""The search over multiples of a step: the smallest strength that forgets, or the best by a score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from unmerge.distributed.warning import warn
from unmerge.tables import html_table, text_table

EVALUATIONS = 12  # at most


@dataclass(frozen=True)
class Point:
    """One strength and what was measured at it."""

    alpha: float
    forget: float
    retain: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class AlphaSearch:
    """The chosen strength, every strength that was tried, and what decided."""

    alpha: float
    curve: list[Point]  # by ascending alpha, un-edited first
    score: str
    target: float
    reached: bool  # whether the forget measure is at most the target
    stopped_by: str  # "target", "retain", "max_alpha" or "best score"

    @property
    def point(self) -> Point:
        return next(point for point in self.curve if point.alpha == self.alpha)

    def __float__(self) -> float:
        return self.alpha

    def __str__(self) -> str:
        return f"{self._sentence()}\n\n{text_table(self._columns(), self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p>{self._sentence()}</p>{html_table(self._columns(), self._rows())}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _sentence(self) -> str:
        point = self.point
        kept = "" if point.retain is None else f", retain {point.retain:.4f}"
        return f"alpha {self.alpha:g} (forget {point.forget:.4f}{kept}), decided by {self.stopped_by}."

    def _columns(self) -> list[str]:
        return ["alpha", "forget", "retain", "score"]

    def _rows(self) -> list[list[str]]:
        def shown(value: float | None) -> str:
            return "" if value is None else f"{value:.4f}"

        return [
            [f"{point.alpha:g}{' *' if point.alpha == self.alpha else ''}"]
            + [shown(value) for value in (point.forget, point.retain, point.score)]
            for point in self.curve
        ]


class Grid:
    """Measurements at multiples of a step, each made once."""

    def __init__(self, at: Callable[[float], Point], step: float, size: int) -> None:
        self._at, self._step, self.size = at, step, size
        self.points: dict[int, Point] = {}

    def __call__(self, place: int) -> Point:
        if place not in self.points:
            # Rounded, so that a strength reads 0.15 and not 0.15000000000000002.
            self.points[place] = self._at(round(place * self._step, 10))
        return self.points[place]

    @property
    def left(self) -> int:
        return EVALUATIONS - len(self.points)

    def place(self, alpha: float) -> int:
        return min(self.size, max(1, round(alpha / self._step)))

    def search(self, place: int, score: str, target: float, stopped_by: str) -> AlphaSearch:
        point = self(place)
        curve = [self.points[known] for known in sorted(self.points)]
        return AlphaSearch(point.alpha, curve, score, target, point.forget <= target, stopped_by)


def smallest(grid: Grid, target: float, max_drop: float) -> AlphaSearch:
    """Bracket by doubling, then bisect: forget and retain accuracy fall as alpha grows.

    Far beyond what an edit removes the forget measure may rise again: where it has, the target may lie in a dip.
    """
    lowest = math.inf if (kept := grid(0).retain) is None else kept - max_drop

    def too_low(place: int) -> bool:
        found = grid(place).retain
        return found is not None and found < lowest

    def reaches(place: int) -> bool:
        return grid(place).forget <= target and not too_low(place)

    def stop(place: int) -> bool:
        return grid(place).forget <= target or too_low(place)

    low, high = 0, grid.place(1.0)
    if stop(0):
        return grid.search(0, "target", target, "target")
    while not stop(high) and high < grid.size:
        low, high = high, min(grid.size, 2 * high)
    lowest_forget = min(point.forget for point in grid.points.values())
    has_risen = grid(high).forget > lowest_forget + target  # by more than a few samples make
    if grid(high).forget <= target or (too_low(high) and not has_risen):
        _bisect(grid, low, high, stop)
    else:
        _refine(grid, lambda place: -math.inf if too_low(place) else -grid(place).forget, reaches)
        if dip := list(filter(reaches, grid.points)):
            _bisect(grid, max(place for place in grid.points if place < min(dip)), min(dip), reaches)
    if reached := list(filter(reaches, grid.points)):
        return grid.search(min(reached), "target", target, "target")
    allowed = [place for place in grid.points if not too_low(place)]
    chosen = min(allowed, key=lambda place: (grid(place).forget, -place))
    found = grid.search(chosen, "target", target, "retain" if too_low(high) else "max_alpha")
    limit = (
        f"retain may drop by {max_drop:g} at most" if too_low(high) else f"alpha is searched up to {grid(high).alpha:g}"
    )
    warn(
        f"no alpha brings the forget measure to {target:g}: it is {found.point.forget:.4f} at alpha={found.alpha:g}, "
        f"and {limit}. The request may be entangled with what is retained: look at unmerge.diagnose."
    )
    return found


def best(grid: Grid, score: str, target: float) -> AlphaSearch:
    """A few strengths over the range, then between the neighbours of the best."""

    def value(place: int) -> float:
        found = grid(place).score
        assert found is not None
        return found

    for alpha in (0, 0.5, 1, 2, 4, 8):
        value(0 if alpha == 0 else grid.place(alpha))
    _refine(grid, value)
    return grid.search(max(sorted(grid.points), key=value), score, target, "best score")


def _bisect(grid: Grid, low: int, high: int, is_enough: Callable[[int], bool]) -> None:
    """Look for the first place that is enough, between one that is not and one that is."""
    while high - low > 1 and grid.left > 0:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)


def _refine(grid: Grid, value: Callable[[int], float], is_enough: Callable[[int], bool] = lambda _: False) -> None:
    """Look between the best place and its neighbours, until one is enough or no evaluation is left."""
    while grid.left > 0 and not any(map(is_enough, grid.points)):
        known = sorted(grid.points)
        best = max(known, key=value)
        place = known.index(best)
        below = known[max(0, place - 1)]
        above = known[place + 1] if place + 1 < len(known) else grid.size
        width, middle = max((upper - lower, (lower + upper) // 2) for lower, upper in ((below, best), (best, above)))
        if width <= 1:
            break
        grid(middle)
