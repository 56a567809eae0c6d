"""Every method on one task, judged on every axis beside retraining: what the tables of the benchmarks show."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import unmerge
from unmerge import baselines
from unmerge.bench.tasks import Task
from unmerge.data.batches import progress
from unmerge.errors import UnmergeWarning
from unmerge.evaluation import Column, Evaluation, Figure, Table, evaluate
from unmerge.evaluation.pipeline import AXES
from unmerge.evaluation.summary import summary
from unmerge.measures import accuracy
from unmerge.model.layers import candidates
from unmerge.recipe import Recipe

RATES = (1.0, 10.0, 100.0)  # times the paper's learning rate
_PAPER_DEPTH = 53  # convolutions of its ResNet-50
FAST_AXES = ("accuracy", "entanglement", "fidelity", "decodability")


def compared(task: Task, *, fast: bool = False, seed: int = 0) -> Evaluation:
    """All methods on a task; `fast` leaves out the trained baselines and the slow axes.

    Baselines whose published learning rate hardly moves so small a model take the best of 1, 10 and 100 times it, by
    retain accuracy · (1 − forget accuracy) on training data; unmerge is not tuned.
    """
    assert isinstance(task.retrained, nn.Module), "its accuracies do not tell what every axis needs"
    chosen = dict(methods(task, fast, seed))
    models: dict[str, nn.Module] = {}
    seconds: dict[str, float] = {}
    for name, method in progress(chosen.items(), "methods", len(chosen), "method"):
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnmergeWarning)  # the paper's rank of 128 is more than small layers have
            models[name] = method()
        seconds[name] = time.perf_counter() - start
    axes = FAST_AXES if fast else tuple(AXES)
    options: dict[str, Any] = {"forward": task.forward, "seed": seed, "init": task.init}
    found = evaluate(models, task.retrained, task.splits, axes, task.floor, **options)
    return with_seconds(found, seconds)


def methods(
    task: Task, fast: bool = False, seed: int = 0, published: bool = False
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Name and maker of every model that stands in the table.

    published: the paper's learning rates, layers and choice of alpha (by ToW, with the retrained model) for its own
    methods, as its tables have them.
    """
    common: dict[str, Any] = {"forward": task.forward, "seed": seed}

    def baseline(name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: baselines.METHODS[name](task.model, task.forget, task.retain, **common, **options)

    yield "un-edited", baseline("unedited")
    if task.classes:
        yield "logit mask", baseline("logit_mask")
        yield "head rows removed", baseline("head_removal")
    if not fast:
        yield "fine-tune", baseline("fine_tune")
        tuned = baseline if published else lambda name: lambda: _tuned(task, name, common)
        yield "NegGrad+", tuned("neggrad_plus")
        yield "random label", baseline("random_label")
        yield "SalUn", baseline("salun")
        yield "NegTV", tuned("neg_tv")
        yield "NegMerge", tuned("neg_merge")
    yield "Kodge et al.", baseline("kodge")
    if task.classes:
        yield "LEACE", baseline("leace")
    for variant in ("pca", "cav-kmeans", "cav-class"):
        if variant == "cav-class" and len(task.classes) == 1:
            continue  # a single class is the mean of its own pool: the paper's basis is empty
        recipe = paper_cell(task, variant)
        if not published:
            recipe = recipe.but(skip_layers="auto")

        def as_published(recipe: Recipe = recipe) -> nn.Module:
            return edited(task, recipe, recalibrate=False, by_reference=published)

        yield f"paper {variant}", as_published
    for name, recipe in (
        ("lda", Recipe(basis="lda")),
        ("private-mean", Recipe(basis="private-mean")),
        ("unmerge", Recipe()),
        ("unmerge, no row removed", Recipe(head="edit")),
    ):
        yield name, partial(edited, task, recipe)


def paper_cell(task: Task, variant: str) -> Recipe:
    """The paper's configuration of a variant for a task's initial weights and depth, with alpha left open."""
    recipe = Recipe.paper(variant, "zero" if task.init == "zero" else "pretrained")
    assert isinstance(recipe.skip_layers, int)
    return recipe.but(alpha=None, skip_layers=as_deep(task.model, recipe.skip_layers))


def as_deep(model: nn.Module, skip: int) -> int:
    """The `skip_layers` that is to this model what `skip` is to the paper's ResNet-50."""
    return round(skip * (len(candidates(model)) - 1) / _PAPER_DEPTH)


def edited(
    task: Task,
    recipe: Recipe,
    recalibrate: bool = True,
    by_reference: bool = False,
    check_init: bool = True,
    with_forgotten: bool = True,
) -> nn.Module:
    """A copy of the model that has forgotten; alpha from the forget set alone where the recipe recommends none.

    by_reference: alpha by ToW against the retrained model instead, as the paper chooses it. with_forgotten: a refit of
    the classifier sees the forgotten images.
    """
    data = task.recalibration if recalibrate else None
    model = copy.deepcopy(task.model)
    fitting: dict[str, Any] = {"init": task.init, "recipe": recipe, "forward": task.forward, "check_init": check_init}
    edit = unmerge.fit(model, task.forget, task.retain, **fitting)
    alpha = edit.alpha
    if alpha is None:
        options: dict[str, Any] = {"recalibrate": data, "forward": task.forward}
        if by_reference:
            options |= {"score": "tow", "reference": task.retrained, "retain": task.retain}
        alpha = unmerge.search_alpha(edit, model, task.forget, **options).alpha
    forget = task.forget if with_forgotten and data is not None else None
    return edit.apply(model, alpha, recalibrate=data, forget=forget, forward=task.forward)


def with_seconds(found: Evaluation, seconds: Mapping[str, float]) -> Evaluation:
    """The evaluation with the seconds that each row took, and its summary in front."""
    rows = {name: {"seconds": Figure(value)} for name, value in seconds.items()}
    tables = {**found.tables, "seconds": Table("seconds", [Column("seconds", None, 2)], rows)}
    return replace(found, tables={"summary": summary(tables), **tables})


def _tuned(task: Task, name: str, common: dict[str, Any]) -> nn.Module:
    """The best of a few learning rates, by what can be seen on training data."""
    rate = inspect.signature(baselines.METHODS[name]).parameters["lr"].default
    best: tuple[float, nn.Module] | None = None
    for times in RATES:
        model = baselines.METHODS[name](task.model, task.forget, task.retain, lr=rate * times, **common)
        kept, lost = (accuracy(model, data, task.forward) for data in (task.retain, task.forget))
        score = kept * (1 - lost)
        if best is None or score > best[0]:
            best = (score, model)
    assert best is not None
    return best[1]
