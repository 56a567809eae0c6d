"""A request in parts that fit the memory: the layers of one are finished before those of the next are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from unmerge.collecting.collection import View, distinct_labels, looked, view_of
from unmerge.collecting.statistics import Statistics, joined
from unmerge.data.batches import Forward, check_rereadable
from unmerge.data.reading import Reading
from unmerge.model.evaluating import evaluating
from unmerge.model.initial import Init, lacking
from unmerge.model.layers import candidates, head_of
from unmerge.model.selection import Selection, select
from unmerge.planning.costs import costs_of, grams_of
from unmerge.planning.plans import Plan, bytes_of, plan_within
from unmerge.recipe import Recipe, given_or_default
from unmerge.requests.gathering import Source, Sources
from unmerge.requests.request import Request, nothing_selected


def plan(
    model: nn.Module,
    recipe: Recipe | None = None,
    memory: int | str | None = None,
    data: Iterable[Any] | None = None,
    *,
    retain: Source | None = None,
    forward: Forward | None = None,
) -> Plan:
    """How many passes over the data `fit(..., memory=memory)` makes, what each takes and what it sketches; print it.

    data: the forget batches, of which the first shows which layers share their input and so their statistics; without
    them each layer is counted for itself, and the model may be on the meta device, which stands for a GPU.
    retain: where its samples have labels, of which each has a sum in every layer, the retain batches or statistics.
    """
    recipe = given_or_default(recipe)
    view = View({}, select(model, recipe.layers, recipe.skip_layers))
    for source, what in ((data, "data"), (retain, "retain")):
        if source is not None and not isinstance(source, Statistics):
            check_rereadable(source, what, "a plan, and the request after it,")
    with evaluating(model):
        if data is not None:
            view = looked(model, view, Reading(model, data, "plan", forward).few, forward)
        classes = (_classes(data), _classes(retain))
    names = _edited(model, recipe, view, None)
    return _plan(model, recipe, view, names, memory, classes, with_verdict=True)


def views_of(
    model: nn.Module, sources: Sources, recipe: Recipe, memory: int | str | None, with_verdict: bool
) -> tuple[list[View | None], list[str], Plan | None]:
    """The parts that a request is read in, the layers of all of them, and the plan that they follow.

    Without a bound there is one part, which is read without a plan and shows itself which layers there are.
    """
    if memory is None:
        return [None], [], None
    given = sources.given
    forget = sources.forget if not isinstance(sources.forget, Statistics) else None
    for source, what in ((sources.forget, "forget"), (sources.retain, "retain")):
        if source is not None and not isinstance(source, Statistics):
            check_rereadable(source, what, "memory=")
    view = view_of(model, recipe.layers if given is None else given, recipe.skip_layers)
    kept = sources.retain if sources.statistics is None else sources.statistics
    with evaluating(model):
        if forget is not None:
            few = Reading(model, forget, "forget", sources.forward).few
            view = looked(model, view, few, sources.forward, sources.mask)
        classes = (_classes(sources.forget), _classes(kept))
    names = _edited(model, recipe, view, given)
    if not names:
        raise nothing_selected()
    found = _plan(model, recipe, view, names, memory, classes, with_verdict)
    view = replace(view, sketches=found.sketches)
    views = [view.only(group.layers, with_left_out=place == 0) for place, group in enumerate(found.groups)]
    return [*views], names, found


def expected_layers(model: nn.Module, recipe: Recipe, init: Init, given: Statistics | None = None) -> list[str]:
    """The layers to edit, as far as they are known before data are read: those with no inputs are not told apart.

    Which layer is the classifier, data alone tell: where it is kept, a single one that init lacks is taken for it.
    """
    selected = select(model, recipe.layers, recipe.skip_layers) if given is None else Selection([])
    own = candidates(model)  # statistics of another model are told of where they meet this one
    names = [name for name in _edited(model, recipe, View({}, selected), given) if name in own]
    absent = lacking(model, init, names) if recipe.head == "keep" and given is None else []
    return [name for name in names if name not in absent] if len(absent) == 1 < len(names) else names


def without_moments(request: Request) -> Request:
    """All of a request but what takes memory: enough to describe the edit."""
    return request.with_each(lambda statistics: replace(statistics, layers={}))


def described_together(requests: Sequence[Request]) -> Request:
    """The description of a request whose parts are given without their moments."""
    # Those with layers first: what was read of the others may have ended early.
    first, *others = sorted(requests, key=lambda request: not request.statistics.shift_to)
    sides: Any = {}
    for side in ("forget", "retain", "whole"):
        if getattr(first, side) is not None:
            sides[side] = joined([getattr(request, side) for request in (first, *others)])
    if first.forget is not None:
        sides["retain"].left_out = {**sides["forget"].left_out, **sides["retain"].left_out}
    return replace(first, **sides)


def _plan(
    model: nn.Module,
    recipe: Recipe,
    view: View,
    names: Sequence[str],
    memory: int | str | None,
    classes: tuple[int, int],
    with_verdict: bool,
) -> Plan:
    leaders = {} if view.probe is None else view.probe.leader
    bound = None if memory is None else bytes_of(memory)
    grams = grams_of(recipe, *classes, with_verdict)
    costs = costs_of(model, names, leaders, grams, recipe, classes[0], bound, view.sketches)
    return plan_within(costs, bound)


def _classes(source: Source | None) -> int:
    """How many labels the samples of one side have."""
    if isinstance(source, Statistics):
        return len(source.classes)
    return 0 if source is None else len(distinct_labels(source))


def _edited(model: nn.Module, recipe: Recipe, view: View, given: Statistics | None) -> list[str]:
    if given is not None:
        return Request(None, None, given).layers(model, recipe)
    seen = None if view.probe is None else view.probe.head
    kept = (seen or head_of(model)) if recipe.head == "keep" else None
    return [name for name in view.selection.names if name != kept]
