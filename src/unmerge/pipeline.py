"""fit(): Algorithm 1, from two data sets and a checkpoint to an edit."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import Forward, Mask, device_of
from unmerge.diagnosing.verdict import Evidence, Verdict
from unmerge.distributed.processes import agreed, copy_first_, same_everywhere, size, together
from unmerge.editing.edit import Edit
from unmerge.errors import DataError, LayerError, RecipeError, listing, reasons, warn
from unmerge.model import initial
from unmerge.model.initial import Init, TaskVectors
from unmerge.model.layers import tensor_name
from unmerge.model.ledger import as_collected
from unmerge.model.origin import check_origin
from unmerge.model.selection import select
from unmerge.provenance import finished_edit
from unmerge.recipe import Recipe, given_or_default
from unmerge.requests.gathering import Source
from unmerge.requests.parts import Sources, described_together, expected_layers, views_of, without_moments
from unmerge.requests.request import Request
from unmerge.solving.doses import Doses
from unmerge.solving.fitting import Clock, Fitted, fit_layers
from unmerge.solving.heads import check_removal


@together
def fit(
    model: nn.Module,
    forget: Source | None = None,
    retain: Source | None = None,
    *,
    init: Init,
    recipe: Recipe | None = None,
    classes: Sequence[int] | None = None,
    statistics: Statistics | None = None,
    mask: Mask = None,
    forward: Forward | None = None,
    memory: int | str | None = None,
    on_verdict: str = "warn",
    check_init: bool = True,
) -> Edit:
    """The edit that makes `model` forget `forget` and keep `retain`; the model itself is not changed.

    forget, retain: batches (a DataLoader, a list) or their `Statistics`. In their place `classes` and the
    `statistics` of everything, for whole classes. Statistics from before edits that the model carries stay in use:
    the new edit is fitted on the weights from before and adds to the others.
    init: the weights before fine-tuning, "zero" when trained from scratch; a stranger's are refused unless
    check_init=False. mask, forward: as for `collect`.
    memory: bytes, or text such as "8GB", that statistics and linear algebra may take beside the model: the layers are
    then read in as many passes as that needs, each finished before the next, and one whose own Gram takes more is
    sketched (`unmerge.plan` shows all of it).
    on_verdict: whether to "warn", "raise" or "ignore" when samples that are not whole classes have nothing in common.
    """
    recipe = given_or_default(recipe)
    if on_verdict not in ("warn", "raise", "ignore"):
        raise RecipeError(f"on_verdict={on_verdict!r} is not 'warn', 'raise' or 'ignore'.")
    if isinstance(classes, Iterator):  # which can be read once
        classes = list(classes)
    sources = Sources(forget, retain, classes, statistics, mask, forward)
    asked, fitted, read = recipe, Fitted(), list[Request]()
    task_vectors: TaskVectors | None = None
    evidence, verdict = Evidence(), None
    with as_collected(model, None if sources.given is None else sources.given.weights) as edits_set_aside:
        clock = Clock(device_of(model))
        start: TaskVectors | None = None
        expected = list[str]()
        if init != "zero" and classes is None:  # what is wrong with it is told before the passes
            expected = expected_layers(model, recipe, init, sources.given)
            start = _start(model, init, expected, recipe, check_init)
        views, planned, plan = views_of(model, sources, recipe, memory, with_verdict=on_verdict != "ignore")
        for view in views:
            with clock("statistics"):
                request = sources.request(model, recipe, view)
            if task_vectors is None and request.statistics.layers:
                recipe = request.settled(recipe)
                names = planned or request.layers(model, recipe)
                if start is None or names != expected:
                    start = _start(model, init, names, recipe, check_init)
                task_vectors = start
                if init != "zero":
                    fitted.unchanged = _unchanged(model, names, task_vectors, request, recipe)
                fitted.names = [name for name in names if name not in fitted.unchanged]
                check_removal(model, request, fitted.names, recipe)
            here = [name for name in fitted.names if name in request.statistics.layers]
            if here and on_verdict != "ignore" and not request.classes:
                with clock("verdict"):
                    evidence.add(model, request, here, retain, recipe.seed, mask, forward, view)
            if view is views[-1] and evidence.layers:
                verdict = evidence.verdict()
                _heed(verdict, on_verdict)
            if plan is not None:
                gc.collect()  # what the passes left in cycles would count beside the linear algebra
            if task_vectors is not None:
                doses = Doses.of(model, fitted.names, request, recipe)
                fit_layers(fitted, model, here, task_vectors, request, recipe, clock, doses)
            read.append(without_moments(request))
            del request  # before the next part is read
        fitted.seconds = clock.seconds
    request = described_together(read)
    if task_vectors is None:
        raise LayerError(
            f"no selected layer is left to edit: {reasons(request.statistics.left_out)}. Pass data that reach the "
            "layers, a lower rank and retain_rank, or other layers=..."
        )
    if not fitted.layers:
        raise LayerError("the retain class means span the whole input of every layer. Use basis='lda'.")
    edit = finished_edit(model, fitted, request, recipe, asked, init, verdict, edits_set_aside)
    if plan is not None:
        edit = replace(edit, provenance={**edit.provenance, "plan": plan.to_dict()})
    return edit if size() == 1 else _of_first_process(edit)


def _of_first_process(edit: Edit) -> Edit:
    """The first process's edit in place of this one's, which may differ in rounding."""
    agreed({name: layer.rank for name, layer in edit.layers.items()}, "the processes found edits of different rank")

    layers = {}
    for name, layer in edit.layers.items():
        parts: Any = {part: getattr(layer, part) for part in ("B", "Q", "shift")}
        parts = {part: copy_first_(value.contiguous()) for part, value in parts.items() if value is not None}
        layers[name] = replace(layer, **parts)
    return replace(edit, layers=layers, provenance=same_everywhere(edit.provenance))


def _start(model: nn.Module, init: Init, names: list[str], recipe: Recipe, check_init: bool) -> TaskVectors:
    """What fine-tuning added to the layers; initial weights that are not theirs are refused."""
    found = initial.task_vectors(model, init, names, with_biases=recipe.bias == "shrink")
    if check_init and init != "zero":
        check_origin(found.pairs())
    return found


def _unchanged(
    model: nn.Module, names: list[str], task_vectors: TaskVectors, request: Request, recipe: Recipe
) -> list[str]:
    """The layers that fine-tuning left alone, in which there is nothing to take back."""
    moved = {name for name in task_vectors if task_vectors.has_moved(name)}
    unchanged = [name for name in names if not {tensor_name(name, part) for part in ("weight", "bias")} & moved]
    if request.classes and recipe.head in ("auto", "remove"):
        # Rows can be taken out of a classifier that was not trained.
        unchanged = [name for name in unchanged if name != request.head(model)]
    if unchanged and select(model, recipe.layers, recipe.skip_layers).named:
        raise LayerError(
            f"{listing(unchanged)} have the same weights in init as in the model: fine-tuning, or the adapter, left "
            "them alone. Leave them out of layers=..."
        )
    return unchanged


def _heed(verdict: Verdict, on_verdict: str) -> None:
    if verdict.kind != "instance-like":
        return
    message = f"the request looks {verdict}"
    if on_verdict == "raise":
        raise DataError(f"{message} Pass on_verdict='ignore' to edit all the same.")
    warn(f"{message} unmerge.diagnose shows more; on_verdict='raise' refuses such requests.")
