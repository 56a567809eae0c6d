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
from unmerge.distributed.warning import warn
from unmerge.editing.edit import Edit
from unmerge.errors import DataError, LayerError, RecipeError, reasons
from unmerge.model.initial import Init
from unmerge.model.ledger import as_collected
from unmerge.provenance import finished_edit
from unmerge.recipe import Recipe, given_or_default
from unmerge.requests.gathering import Source, Sources
from unmerge.requests.parts import described_together, expected_layers, views_of, without_moments
from unmerge.requests.request import Request
from unmerge.solving.fitting import Clock, Fitted, fit_layers
from unmerge.solving.settling import Start, settle


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
    with as_collected(model, None if sources.given is None else sources.given.weights) as edits_set_aside:
        clock, fitted, evidence = Clock(device_of(model)), Fitted(), Evidence()
        start = Start(model, init, recipe, check_init)
        if not start.is_zero and classes is None:  # what is wrong with it is told before the passes
            start.task_vectors(expected_layers(model, recipe, init, sources.given))
        views, planned, plan = views_of(model, sources, recipe, memory, with_verdict=on_verdict != "ignore")
        asked, settled, verdict, read = recipe, None, None, list[Request]()
        for view in views:  # one, unless memory= deals the layers into several
            with clock("statistics"):
                request = sources.request(model, recipe, view)
            if settled is None and request.statistics.layers:
                settled = settle(model, request, recipe, planned, start)
                recipe = settled.recipe
            names = [] if settled is None else settled.of(request)
            if names and on_verdict != "ignore" and not request.classes:
                with clock("verdict"):
                    evidence.add(model, request, names, retain, recipe.seed, mask, forward, view)
            if view is views[-1] and evidence.layers:
                verdict = evidence.verdict()
                _heed(verdict, on_verdict)
            if plan is not None:
                gc.collect()  # what the passes left in cycles would count beside the linear algebra
            if settled is not None:
                fit_layers(fitted, model, request, settled, clock)
            read.append(without_moments(request))
            del request  # before the next part is read
    request = described_together(read)
    if settled is None:
        raise LayerError(
            f"no selected layer is left to edit: {reasons(request.statistics.left_out)}. Pass data that reach the "
            "layers, a lower rank and retain_rank, or other layers=..."
        )
    if not any(layer.rank for layer in fitted.layers.values()):
        raise LayerError("the retain class means span the whole input of every layer. Use basis='lda'.")
    edit = finished_edit(
        model,
        request,
        settled,
        fitted,
        asked=asked,
        init=init,
        verdict=verdict,
        edits_set_aside=edits_set_aside,
        seconds=clock.seconds,
    )
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


def _heed(verdict: Verdict, on_verdict: str) -> None:
    if verdict.kind != "instance-like":
        return
    message = f"the request looks {verdict}"
    if on_verdict == "raise":
        raise DataError(f"{message} Pass on_verdict='ignore' to edit all the same.")
    warn(f"{message} unmerge.diagnose shows more; on_verdict='raise' refuses such requests.")
