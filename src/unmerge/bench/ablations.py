"""Ablations of the method: rows that differ from the paper's CAV-Class or PCA cell, or the default, in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from unmerge.bench.comparison import edited
from unmerge.bench.tasks import Task
from unmerge.initial import Init
from unmerge.recipe import Recipe

Rows = Iterator[tuple[str, Recipe]]


def _terms() -> Rows:
    for name, lam, gamma in (("projection", 0, 0), ("retain term", 50, 0), ("size term", 0, 0.5), ("both", 50, 0.5)):
        yield name, Recipe.paper("cav-kmeans").but(lam=lam, gamma=gamma, alpha=None)


def _solver() -> Rows:
    for variant in ("pca", "cav-kmeans"):
        cell = Recipe.paper(variant).but(alpha=None)
        yield f"{variant}, projection", cell.but(solver="exact", lam=0, gamma=0)
        for solver in ("exact", "budgeted", "soft-threshold"):
            yield f"{variant}, {solver}", cell.but(solver=solver)


def _rank() -> Rows:
    for variant in ("pca", "cav-kmeans"):
        for rank in (8, 16, 32, 64, 128):
            yield f"{variant}, rank {rank}", Recipe.paper(variant).but(rank=rank, retain_rank=rank, alpha=None)


def _skip() -> Rows:
    for skip in (35, 40, 45, 50):
        yield f"cav-kmeans, skip {skip}", Recipe.paper("cav-kmeans").but(skip_layers=skip, alpha=None)
        yield f"default, skip {skip}", Recipe(skip_layers=skip)


def _lambda() -> Rows:
    for lam in (1, 5, 10, 20, 50):
        yield f"cav-kmeans, lambda {lam}", Recipe.paper("cav-kmeans").but(lam=lam, alpha=None)
        yield f"lda, lambda {lam}", Recipe(basis="lda", lam=lam)


def _strength() -> Rows:
    for alpha in (0.6, 0.87, 1.15, 1.3):  # 0.87: the mean of the two edits, once
        yield f"default, alpha {alpha:g}", Recipe(alpha=alpha)


def _head() -> Rows:
    for times in (0.0, 0.5, 2.0):
        yield f"default, no row removed, outputs lowered x{times:g}", Recipe(head="edit", head_strength=times)


ABLATIONS: dict[str, Callable[[], Rows]] = {
    "terms": _terms,
    "solver": _solver,
    "rank": _rank,
    "skip": _skip,
    "lambda": _lambda,
    "strength": _strength,
    "head": _head,
}


def inits(task: Task, wrong: Mapping[str, Tensor]) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Rows with the true initial weights (where there are any), with zero, and with those of another training."""
    states: dict[str, Init] = {"zero": "zero", "wrong": wrong}
    if task.init != "zero":
        states = {"true": task.init, **states}
    for name, init in states.items():
        for variant, recipe in (("default", Recipe()), ("cav-kmeans", Recipe.paper("cav-kmeans").but(alpha=None))):
            plain = recipe.mean == "free"
            options: dict[str, Any] = {"recalibrate": not plain, "by_reference": plain, "check_init": False}
            yield f"init: {variant}, {name}", partial(edited, replace(task, init=init), recipe, **options)


def ablated(task: Task, name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Name and maker of each row of an ablation; alpha is searched again for each."""
    for row, recipe in ABLATIONS[name]():
        plain = recipe.mean == "free"

        def make(recipe: Recipe = recipe, plain: bool = plain) -> nn.Module:
            return edited(task, recipe, recalibrate=not plain, by_reference=plain)

        yield f"{name}: {row}", make
