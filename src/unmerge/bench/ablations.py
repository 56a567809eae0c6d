"""Ablations of the method: rows that differ from the paper's CAV-KMeans or PCA cell, or the default, in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from unmerge.bench.comparison import as_deep, edited, paper_cell
from unmerge.bench.tasks import Task
from unmerge.model.initial import Init
from unmerge.recipe import Recipe

Rows = Iterator[tuple[str, Recipe]]


def _terms(task: Task) -> Rows:
    for name, lam, gamma in (("projection", 0, 0), ("retain term", 50, 0), ("size term", 0, 0.5), ("both", 50, 0.5)):
        yield name, paper_cell(task, "cav-kmeans").but(lam=lam, gamma=gamma)


def _solver(task: Task) -> Rows:
    for variant in ("pca", "cav-kmeans"):
        yield f"{variant}, projection", paper_cell(task, variant).but(solver="exact", lam=0, gamma=0)
        for solver in ("exact", "budgeted", "soft-threshold"):
            yield f"{variant}, {solver}", paper_cell(task, variant).but(solver=solver)


def _rank(task: Task) -> Rows:
    for variant in ("pca", "cav-kmeans"):
        for rank in (8, 16, 32, 64, 128):
            yield f"{variant}, rank {rank}", paper_cell(task, variant).but(rank=rank, retain_rank=rank)


def _skip(task: Task) -> Rows:
    for skip in (as_deep(task.model, skip) for skip in (35, 40, 45, 50)):
        yield f"cav-kmeans, skip {skip}", paper_cell(task, "cav-kmeans").but(skip_layers=skip)
        yield f"default, skip {skip}", Recipe(skip_layers=skip)


def _lambda(task: Task) -> Rows:
    for lam in (1, 5, 10, 20, 50):
        yield f"cav-kmeans, lambda {lam}", paper_cell(task, "cav-kmeans").but(lam=lam)
        yield f"lda, lambda {lam}", Recipe(basis="lda", lam=lam)


def _strength(_: Task) -> Rows:
    for alpha in (0.6, 0.76, 0.87, 1.15, 1.3):  # 0.76: the mean of the two edits, once
        yield f"default, alpha {alpha:g}", Recipe(alpha=alpha)


def _early(_: Task) -> Rows:
    for share in (0.0, 0.5, 1.0):  # 1: as strong in every layer
        yield f"default, early layers x{share:g}", Recipe(early_strength=share)


def _refit(_: Task) -> Rows:
    yield "default, classifier not refitted", Recipe(refit=None)
    for ridge in (0.01, 1.0):
        yield f"default, classifier refitted with ridge {ridge:g}", Recipe(refit=ridge)


def _length(_: Task) -> Rows:
    for times in (1.0, 1.15, 1.3, 1.5):  # 1: what the edit leaves of the mean answers to forgotten classes
        yield f"default, mean answers x{times:g}", Recipe(answer_length=times)


def _retained(_: Task) -> Rows:
    yield "default, refitted to retained images alone", Recipe()
    yield "default, alpha 0.87, refitted to retained images alone", Recipe(alpha=0.87)  # the default before


def _head(_: Task) -> Rows:
    for times in (0.0, 0.5, 2.0):
        yield f"default, no row removed, outputs lowered x{times:g}", Recipe(head="edit", head_strength=times)


ABLATIONS: dict[str, Callable[[Task], Rows]] = {
    "terms": _terms,
    "solver": _solver,
    "rank": _rank,
    "skip": _skip,
    "lambda": _lambda,
    "strength": _strength,
    "early": _early,
    "refit": _refit,
    "length": _length,
    "retained": _retained,
    "head": _head,
}


def inits(
    task: Task, stranger: str, wrong: Callable[[], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Rows with the true initial weights (where there are any), with zero, and with a stranger's."""
    starts: dict[str, Callable[[], Init]] = {"zero": lambda: "zero", stranger: wrong}
    if task.init != "zero":
        starts = {"true": lambda: task.init, **starts}
    recipes = {"default": Recipe(), "cav-kmeans": paper_cell(task, "cav-kmeans")}
    for name, start in starts.items():
        for variant, recipe in recipes.items():

            def make(start: Callable[[], Init] = start, recipe: Recipe = recipe) -> nn.Module:
                return _made(replace(task, init=start()), recipe, check_init=False)

            yield f"init: {variant}, {name}", make


def ablated(task: Task, name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Name and maker of each row of an ablation."""
    for row, recipe in ABLATIONS[name](task):
        yield f"{name}: {row}", partial(_made, task, recipe, with_forgotten=name != "retained")


def _made(task: Task, recipe: Recipe, check_init: bool = True, with_forgotten: bool = True) -> nn.Module:
    """The paper's cells as it has them: alpha by the retrained model, and no BatchNorm re-estimated."""
    plain = recipe.mean == "free"
    return edited(
        task, recipe, recalibrate=not plain, by_reference=plain, check_init=check_init, with_forgotten=with_forgotten
    )
