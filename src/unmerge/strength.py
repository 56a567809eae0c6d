"""search_alpha(): the strength of an edit from the forget set alone, without a retrained model and without a refit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from unmerge.batches import Forward, check_rereadable
from unmerge.distributed import size, summed, together
from unmerge.edit import Edit
from unmerge.errors import EditError, suggest, warn
from unmerge.ledger import ledger_of
from unmerge.measures import accuracy, divergence
from unmerge.tables import html_table, text_table

SCORES = ("target", "kodge", "tow", "kl")
EVALUATIONS = 12  # at most
Metric = Callable[[nn.Module, Any], float]


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


@together
def search_alpha(
    edit: Edit,
    model: nn.Module,
    forget: Iterable[Any],
    target: float = 0.01,
    retain: Iterable[Any] | None = None,
    *,
    max_drop: float = 0.02,
    score: str = "target",
    reference: nn.Module | Mapping[str, float] | None = None,
    metric: Metric | None = None,
    max_alpha: float = 10.0,
    step: float = 0.05,
    recalibrate: Iterable[Any] | None = None,
    forward: Forward | None = None,
) -> AlphaSearch:
    """The smallest alpha whose forget accuracy is at most `target`, by bisection on multiples of `step`.

    The edit is applied and reverted; it is never fitted again. Rows that it removes from the head stay in meanwhile,
    since without them the accuracy would say nothing.

    retain: (a sample of) retain data; its accuracy may drop by at most `max_drop` below the un-edited model's.
    score: "target" as above; "kodge" maximises Acc_R · (1 − Acc_F), "tow" closeness to a `reference` (a model, or its
        accuracies {"forget": ..., "retain": ...}), "kl" minimises the divergence from a reference model on forget.
    metric: in place of the accuracy, a function (model, data) -> number that falls as the model forgets; of several
        processes each calls it, and the mean counts.
    recalibrate: retain batches that BatchNorm statistics are re-estimated from at every alpha, as `apply` does.
    """
    _check(target, max_drop, score, retain, reference, max_alpha, step)
    for name, data in (("forget", forget), ("retain", retain)):
        if data is not None:
            check_rereadable(data, name, "search_alpha")
    if any(entry.edit is edit for entry in ledger_of(model).entries):
        raise EditError(
            "this model carries this edit already, so every alpha would add to it. Call edit.revert(model)."
        )
    trial = replace(edit, removed=())
    # A bias that only the removal of rows changes is not touched meanwhile.
    trial = replace(trial, weights={name: known for name, known in edit.weights.items() if name in trial.touched})
    measure = _mean_over_processes(metric) if metric else lambda changed, data: accuracy(changed, data, forward)
    goal = _goal(score, reference, forget, retain, measure, forward)

    def at(alpha: float) -> Point:
        if alpha == 0:
            return _measured(model, 0.0)
        with trial.applied(model, alpha, recalibrate=recalibrate, forward=forward) as changed:
            return _measured(changed, alpha)

    def _measured(changed: nn.Module, alpha: float) -> Point:
        point = Point(alpha, measure(changed, forget), None if retain is None else measure(changed, retain))
        return point if goal is None else replace(point, score=goal(changed, point))

    grid = _Grid(at, step, math.floor(max_alpha / step + 1e-9))
    if score == "target":
        return _smallest(grid, target, max_drop)
    return _best(grid, score, target)


def _mean_over_processes(metric: Metric) -> Metric:
    def mean(model: nn.Module, data: Any) -> float:
        return summed(float(metric(model, data)))[0] / size()

    return mean


class _Grid:
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


def _smallest(grid: _Grid, target: float, max_drop: float) -> AlphaSearch:
    """Bracket by doubling, then bisect: forget and retain accuracy fall as alpha grows."""
    lowest = math.inf if (kept := grid(0).retain) is None else kept - max_drop

    def too_low(place: int) -> bool:
        found = grid(place).retain
        return found is not None and found < lowest

    def stop(place: int) -> bool:
        return grid(place).forget <= target or too_low(place)

    low, high = 0, grid.place(1.0)
    if stop(0):
        return grid.search(0, "target", target, "target")
    while not stop(high) and high < grid.size:
        low, high = high, min(grid.size, 2 * high)
    if stop(high):
        while high - low > 1 and grid.left > 0:
            middle = (low + high) // 2
            low, high = (low, middle) if stop(middle) else (middle, high)
    else:
        # Far beyond what an edit removes the forget measure may rise again: the target may lie in a dip.
        _refine(grid, lambda place: -grid(place).forget)
    reached = [place for place, point in grid.points.items() if point.forget <= target and not too_low(place)]
    if reached:
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


def _best(grid: _Grid, score: str, target: float) -> AlphaSearch:
    """A few strengths over the range, then between the neighbours of the best."""

    def value(place: int) -> float:
        found = grid(place).score
        assert found is not None
        return found

    for alpha in (0, 0.5, 1, 2, 4, 8):
        value(0 if alpha == 0 else grid.place(alpha))
    _refine(grid, value)
    return grid.search(max(sorted(grid.points), key=value), score, target, "best score")


def _refine(grid: _Grid, value: Callable[[int], float]) -> None:
    """Spend what is left of the evaluations between the best place and its neighbours."""
    while grid.left > 0:
        known = sorted(grid.points)
        best = max(known, key=value)
        place = known.index(best)
        below = known[max(0, place - 1)]
        above = known[place + 1] if place + 1 < len(known) else grid.size
        width, middle = max((upper - lower, (lower + upper) // 2) for lower, upper in ((below, best), (best, above)))
        if width <= 1:
            break
        grid(middle)


def _goal(
    score: str,
    reference: nn.Module | Mapping[str, float] | None,
    forget: Iterable[Any],
    retain: Iterable[Any] | None,
    measure: Metric,
    forward: Forward | None,
) -> Callable[[nn.Module, Point], float] | None:
    """What is to be largest, as a function of the changed model and what was measured of it."""
    if score == "kodge":
        return lambda _, point: (point.retain or 0.0) * (1 - point.forget)
    if score == "tow":
        if isinstance(reference, nn.Module):
            known = {"forget": measure(reference, forget), "retain": measure(reference, retain)}
        else:
            known = dict(reference or {})
        return lambda _, point: (
            (1 - abs(point.forget - known["forget"])) * (1 - abs((point.retain or 0.0) - known["retain"]))
        )
    if score == "kl":
        assert isinstance(reference, nn.Module)
        return lambda changed, _: -divergence(changed, reference, forget, forward)
    return None


def _check(
    target: float,
    max_drop: float,
    score: str,
    retain: Any,
    reference: Any,
    max_alpha: float,
    step: float,
) -> None:
    if not 0 < target < 1:
        raise EditError(f"target={target!r} is not a share between 0 and 1, for example 0.01.")
    if not 0 <= max_drop <= 1:
        raise EditError(f"max_drop={max_drop!r} is not a share from 0 to 1, for example 0.02.")
    if not 0 < step <= max_alpha or not math.isfinite(max_alpha):
        raise EditError(f"step={step!r} and max_alpha={max_alpha!r}: expected 0 < step <= max_alpha.")
    if score not in SCORES:
        raise EditError(f"score={score!r} is unknown. {suggest(str(score), SCORES)}")
    if score in ("kodge", "tow") and retain is None:
        raise EditError(f"score={score!r} needs retain=, a sample of retain data.")
    if score == "kl" and not isinstance(reference, nn.Module):
        raise EditError("score='kl' needs reference=, a retrained model.")
    if score == "tow" and not isinstance(reference, nn.Module):
        missing = [name for name in ("forget", "retain") if not isinstance(reference, Mapping) or name not in reference]
        if missing:
            raise EditError(
                f"score='tow' needs reference=, a retrained model or its accuracies; {' and '.join(missing)} missing."
            )
