"""A grid of edits on TOFU, each at and around the strength that the forget set asks for, scored without generation."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from unmerge.bench.tofu_methods import MASKS, Made, Pair, Request, Variant, collected, edited, fitted
from unmerge.errors import DataError, UnmergeError, UnmergeWarning
from unmerge.evaluation import Column, Figure, Table
from unmerge.evaluation.language import Answers, ask, metrics
from unmerge.evaluation.language.answers import Splits
from unmerge.evaluation.language.tofu import UTILITY, harmonic_mean
from unmerge.recipe import Recipe
from unmerge.storage.files import write_json

STRENGTHS = (0.4, 0.475, 0.55, 0.7, 1.0)  # times the alpha that the forget set asks for
COLUMNS = [
    Column("forget quality", "higher", 4),
    Column("utility of six", "higher", 4),
    Column("forget prob.", "near", 3),
    Column("retain prob.", "near", 3),
    Column("alpha", None, 2),
    Column("seconds", "lower", 2),
]
_SIX = tuple(name for name in UTILITY if not name.endswith("ROUGE"))


def grid(blocks: int) -> dict[str, Variant]:
    """Every cell under its name: basis, layers, tokens, init and what becomes of the mean."""
    layers: dict[str, Any] = {
        "upper mlp": f"mlp:last{max(1, blocks // 2)}",
        "all mlp": "mlp",
        "all down": r"re:mlp\.down_proj$",
        "attention": "attention",
        "all linear": ["mlp", "attention"],
    }
    bases: dict[str, dict[str, Any]] = {
        f"contrastive {rank}": {"basis": "contrastive", "rank": rank} for rank in (4, 16, 64, 256)
    }
    # Sharper in what is private to the forget set, and further away from what the retain set has most of.
    bases["contrastive 64 sharp"] = bases["contrastive 64"] | {"ridge": 1e-3}
    bases["contrastive 64 protected"] = bases["contrastive 64"] | {"retain_rank": 192, "lam": 100.0}
    # The wide ones keep every direction.
    bases |= {
        f"wiener {rank} lambda {lam:g}": {"basis": "wiener", "rank": rank, "lam": lam}
        for rank in (64, 256, 2048)
        for lam in (1.0, 10.0, 100.0, 1000.0)
    }
    bases["wiener 2048 sharp"] = bases["wiener 2048 lambda 10"] | {"ridge": 1e-4}
    bases |= {
        f"deflated {deflate}": {"basis": "deflated-pca", "rank": 64, "deflate": deflate, "lam": 0.0}
        for deflate in (96, 192, 384)
    }
    bases |= {basis: {"basis": basis} for basis in ("lda", "private-mean", "blend")}
    means: dict[str, dict[str, Any]] = {"mean free": {"mean": "free"}, "mean kept": {"mean": "orthogonal"}}
    choices = itertools.product(bases, layers, MASKS, ("base", "zero"), means)
    return {
        ", ".join(parts): Variant(
            Recipe(layers=layers[parts[1]], head="keep", **bases[parts[0]] | means[parts[4]]), parts[2], parts[3]
        )
        for parts in choices
    }


def cells(request: Request) -> dict[str, Callable[[], Made]]:
    """Every cell at every strength as a row, under the name that `explored` gives it."""
    return {
        f"{name}, x{times:g}": partial(edited, request, variant, times)
        for name, variant in grid(request.blocks).items()
        for times in STRENGTHS
    }


def explored(
    request: Request,
    tokenizer: Any,
    splits: Splits,
    anchors: Mapping[str, Callable[[], nn.Module]],
    cache: Path,
    only: Sequence[str],
) -> Table:
    """The cells of the grid, the best forget quality first; each is kept in a file of `cache`.

    anchors: makes "retrained" and other models to compare with, which are asked as the cells are.
    only: parts of names, such as "upper mlp, base": a cell that has all parts of one of them is chosen; empty: all.
    """
    chosen = chosen_cells(grid(request.blocks), only)
    probed = {name: part for name, part in splits.items() if name != "holdout"}
    asked = {
        name: _anchor(make, request, tokenizer, probed, cache / f"{name}.safetensors") for name, make in anchors.items()
    }
    retrained = asked["retrained"]
    found = {name: _figures(answers, probed, retrained) for name, answers in asked.items()}
    statistics: dict[str, Pair] = {}
    measured: dict[str, dict[str, float]] = {}
    for name, variant in tqdm(chosen.items(), desc="cells", disable=None):
        path = cache / f"{name.replace(', ', '-').replace(' ', '_')}.json"
        if not path.is_file():
            if variant.tokens not in statistics:
                statistics[variant.tokens] = collected(request, variant.tokens, ["mlp", "attention"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnmergeWarning)
                rows = _cell(request, variant, statistics[variant.tokens], tokenizer, probed, retrained)
            write_json(path, rows)
        for times, row in json.loads(path.read_text()).items():
            measured[f"{name}, x{times}"] = row
    found |= dict(sorted(measured.items(), key=lambda entry: -entry[1]["forget quality"]))
    figures = {name: {label: Figure(value) for label, value in row.items()} for name, row in found.items()}
    return Table("cells", COLUMNS, figures, list(anchors), "retrained")


def chosen_cells(known: Mapping[str, Variant], only: Sequence[str]) -> dict[str, Variant]:
    """The cells that have all parts of one of some names."""
    wanted = [set(name.split(", ")) for name in only]
    chosen = {name: cell for name, cell in known.items() if any(parts <= set(name.split(", ")) for parts in wanted)}
    if only and not chosen:
        parts = list(dict.fromkeys(part for name in known for part in name.split(", ")))
        raise DataError(f"no cell is called {' or '.join(map(repr, only))}. Names are made of: {', '.join(parts)}.")
    return chosen if only else dict(known)


def _anchor(make: Callable[[], nn.Module], request: Request, tokenizer: Any, probed: Splits, path: Path) -> Answers:
    """What a model to compare with says, from the cache where it was there before."""
    if not path.is_file():
        _asked(make(), request, tokenizer, probed).save(path)
    return Answers.load(path)


def _asked(model: nn.Module, request: Request, tokenizer: Any, probed: Splits) -> Answers:
    """What needs no generation, in one precision for all models: forget quality compares their answers."""
    return ask(model, tokenizer, probed, autocast=request.half)


def _cell(
    request: Request, variant: Variant, statistics: Pair, tokenizer: Any, probed: Splits, retrained: Answers
) -> dict[str, dict[str, float]]:
    """The figures at every strength; none where the recipe finds no direction."""
    start = time.perf_counter()
    try:
        edit = fitted(request, variant, statistics)
    except UnmergeError:
        return {}
    seconds = request.seconds_since(start)
    alpha = request.strength(edit).alpha
    rows = {}
    for times in STRENGTHS:
        with edit.applied(request.model, times * alpha) as changed:
            answers = _asked(changed, request, tokenizer, probed)
        rows[f"{times:g}"] = _figures(answers, probed, retrained) | {"alpha": times * alpha, "seconds": seconds}
    return rows


def _figures(answers: Answers, probed: Splits, retrained: Answers) -> dict[str, float]:
    values = {name: metric.value for name, metric in metrics(answers, probed, retrained).items()}
    return {
        "forget quality": values["forget_quality"],
        "utility of six": harmonic_mean([values[name] for name in _SIX]),
        "forget prob.": values["forget_Q_A_Prob"],
        "retain prob.": values["retain_Q_A_Prob"],
    }
