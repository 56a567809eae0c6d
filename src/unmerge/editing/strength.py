"""search_alpha(): the strength of an edit from the forget set alone, without a retrained model or another fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from torch import nn

from unmerge.data.batches import Forward, check_rereadable
from unmerge.distributed.processes import size, summed, together
from unmerge.editing.edit import Edit
from unmerge.editing.searching import AlphaSearch, Grid, Point, best, smallest
from unmerge.errors import DataError, EditError, suggest
from unmerge.measures import accuracy, divergence
from unmerge.model.ledger import entry_of

SCORES = ("target", "kodge", "tow", "kl")
Metric = Callable[[nn.Module, Any], float]


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
    recalibrate: retain batches that BatchNorm statistics are re-estimated from, and the classifier refitted with them
        and `forget`, at every alpha, as `apply(recalibrate=..., forget=...)` does; without `forget` where a metric says
        what its batches are.
    """
    _check(target, max_drop, score, retain, reference, max_alpha, step)
    for name, data in (("forget", forget), ("retain", retain)):
        if data is not None:
            check_rereadable(data, name, "search_alpha")
    if entry_of(model, edit) is not None:
        raise EditError(
            "this model carries this edit already, so every alpha would add to it. Call edit.revert(model)."
        )
    trial = replace(edit, removed=())
    # A bias that only the removal of rows changes is not touched meanwhile.
    trial = replace(trial, weights={name: known for name, known in edit.weights.items() if name in trial.touched})
    refit = {"forget": forget} if recalibrate is not None and metric is None else {}
    measure = _mean_over_processes(metric) if metric else lambda changed, data: accuracy(changed, data, forward)
    goal = _goal(score, reference, forget, retain, measure, forward)

    def at(alpha: float) -> Point:
        if alpha == 0:
            return _measured(model, 0.0)
        with trial.applied(model, alpha, recalibrate=recalibrate, forward=forward, **refit) as changed:
            return _measured(changed, alpha)

    def _measured(changed: nn.Module, alpha: float) -> Point:
        point = Point(alpha, measure(changed, forget), None if retain is None else measure(changed, retain))
        if math.isnan(point.forget) or (point.retain is not None and math.isnan(point.retain)):
            raise DataError(
                f"metric= gave nan at alpha {alpha:g}, which is neither more nor less than a target. Return a number; "
                "where so strong an edit leaves the model without finite outputs, pass a smaller max_alpha."
            )
        if goal is None:
            return point
        reached = goal(changed, point)
        if not math.isfinite(reached):
            raise DataError(
                f"score={score!r} is {reached} at alpha {alpha:g}, so no alpha is the best. Look at the outputs (or "
                "accuracies) of reference=, or pass a smaller max_alpha."
            )
        return replace(point, score=reached)

    grid = Grid(at, step, math.floor(max_alpha / step + 1e-9))
    if score == "target":
        return smallest(grid, target, max_drop)
    return best(grid, score, target)


def _mean_over_processes(metric: Metric) -> Metric:
    def mean(model: nn.Module, data: Any) -> float:
        return summed(float(metric(model, data)))[0] / size()

    return mean


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
    if not _is_number(target) or not 0 < target < 1:
        raise EditError(f"target={target!r} is not a share between 0 and 1, for example 0.01.")
    if not _is_number(max_drop) or not 0 <= max_drop <= 1:
        raise EditError(f"max_drop={max_drop!r} is not a share from 0 to 1, for example 0.02.")
    if not (_is_number(step) and _is_number(max_alpha) and 0 < step <= max_alpha):
        raise EditError(f"step={step!r} and max_alpha={max_alpha!r}: expected numbers with 0 < step <= max_alpha.")
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


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
