"""The rows of the TOFU benchmark: edits of several kinds, and the gradient baselines."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import unmerge
from unmerge import tokens
from unmerge.baselines.language import METHODS
from unmerge.bench.tofu_tables import repeated
from unmerge.data.batches import Mask
from unmerge.editing.searching import AlphaSearch
from unmerge.evaluation.language import Encoded, score
from unmerge.model.shorthands import blocks_of
from unmerge.recipe import LayerChoice, Recipe
from unmerge.requests.gathering import needed_of

MAX_ALPHA = 128.0
MASKS: dict[str, Mask] = {"all": "content", "answers": tokens.answer, "names": "names"}  # whose inputs count
RATE = 1e-5  # the baselines' published learning rate
Pair = tuple[unmerge.Statistics, unmerge.Statistics]  # of forget and retain
BASELINES = {"GradDiff": "grad_diff", "NPO": "npo", "RMU": "rmu"}


@dataclass(frozen=True)
class Request:
    """A fine-tuned model and what it is to forget."""

    model: nn.Module
    init: Mapping[str, Tensor]  # the weights before fine-tuning
    forget: Sequence[Mapping[str, Tensor]]
    retain: Sequence[Mapping[str, Tensor]]
    forget_sequences: Sequence[Encoded]
    target: float  # the answer probability that counts as forgotten
    half: bool  # forward passes in bfloat16
    seed: int = 0

    @property
    def blocks(self) -> int:
        return len(blocks_of(self.model))

    def forward(self, model: Any, batch: Any) -> Any:
        """The trunk alone: statistics need no logit."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.half):
            return model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    def probability(self, model: nn.Module, sequences: Sequence[Encoded]) -> float:
        """The mean answer probability."""
        return float(score(model, sequences, autocast=self.half, what="alpha").probabilities.mean())

    def strength(self, edit: unmerge.Edit) -> AlphaSearch:
        """The smallest alpha at which the forget answers are no likelier than those on unknown authors."""
        return unmerge.search_alpha(
            edit, self.model, self.forget_sequences, self.target, metric=self.probability, max_alpha=MAX_ALPHA
        )

    def seconds_since(self, start: float) -> float:
        """Seconds until the device has done all that it was given."""
        if self.half:
            torch.cuda.synchronize()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Variant:
    """One way to make an edit."""

    recipe: Recipe
    tokens: str = "all"  # or another of `MASKS`
    init: str = "base"  # or "zero"


@dataclass(frozen=True)
class Made:
    """A model that has forgotten, what that took, and what there is to say of it."""

    model: nn.Module
    seconds: float
    notes: dict[str, Any] = field(default_factory=dict)


def variants(blocks: int) -> dict[str, Variant]:
    """The edits that stand in the table, for a model of so many blocks."""
    upper = Recipe(layers=f"mlp:last{max(1, blocks // 2)}", head="keep")
    every = upper.but(layers="mlp")
    # The paper edits 16 of 28 blocks and deflates 1024 of 3072 and of 8192 features; 192 is that share of 576 and 1536.
    published = {"basis": "deflated-pca", "rank": 64, "lam": 0.0, "mean": "free"}
    paper = upper.but(layers=f"mlp:last{max(1, round(blocks * 16 / 28))}", **published)
    contrastive = upper.but(basis="contrastive", rank=64)
    found = {
        "paper": Variant(paper),
        "deflated-pca": Variant(paper.but(deflate=192)),
        "deflated-pca, answers": Variant(paper.but(deflate=192), "answers"),
        "deflated-pca, zero": Variant(paper.but(deflate=192), init="zero"),
        "contrastive 16": Variant(contrastive.but(rank=16)),
        "contrastive 64": Variant(contrastive),
        "contrastive 256": Variant(contrastive.but(rank=256)),
        "contrastive 64, answers": Variant(contrastive, "answers"),
        "contrastive 64, names": Variant(contrastive, "names"),
        "contrastive 64, zero": Variant(contrastive, init="zero"),
        "contrastive 64, down": Variant(contrastive.but(layers=r"re:mlp\.down_proj$")),
        "contrastive 64, all blocks": Variant(every.but(basis="contrastive", rank=64)),
    }
    found |= {
        f"{basis} by author": Variant(upper.but(basis=basis)) for basis in ("lda", "private-mean", "blend", "cav-class")
    }
    found["blend by author, names"] = Variant(upper.but(basis="blend"), "names")
    found["private-mean by author, zero"] = Variant(upper.but(basis="private-mean"), init="zero")
    for name in ("deflated-pca", "contrastive 64", "private-mean by author"):
        found[f"{name}, mean kept"] = replace(found[name], recipe=found[name].recipe.but(mean="orthogonal"))
    found["private-mean by author, all blocks"] = Variant(every.but(basis="private-mean"))
    return found


def methods(request: Request, rates: Sequence[float], repeats: int = 1) -> dict[str, Callable[[], Made]]:
    """Name and maker of every row: the baselines at multiples of their published learning rate, then the edits.

    repeats: how often each baseline is trained, with another seed each time.
    """
    found: dict[str, Callable[[], Made]] = {}
    for times in rates:
        for name in BASELINES:
            called = name if times == 1 else f"{name} lr x{times:g}"
            for seed in range(request.seed, request.seed + repeats):
                row = called if seed == request.seed else repeated(called, seed)
                found[row] = partial(_baseline, request, name, times, seed)
    for name, variant in variants(request.blocks).items():
        found[name] = partial(edited, request, variant)
    return found


def warm_up(request: Request) -> None:
    """An edit, and a few steps of training: what a process does for the first time is no method's time."""
    variant = variants(request.blocks)["contrastive 64, all blocks"]
    fitted(request, variant, collected(request, variant.tokens, variant.recipe.layers))
    METHODS["npo"](request.model, request.forget[:1], request.retain[:1], epochs=1, seed=request.seed)


def edited(request: Request, variant: Variant, times: float = 1.0) -> Made:
    """A copy of the model with an edit whose strength is so many times what the forget set asks for."""
    start = time.perf_counter()
    statistics = collected(request, variant.tokens, variant.recipe.layers, **needed_of(variant.recipe))
    edit = fitted(request, variant, statistics)
    seconds = request.seconds_since(start)
    start = time.perf_counter()
    search = request.strength(edit)
    alpha = times * search.alpha
    notes = {"alpha": alpha, "reached": search.reached, "search_seconds": request.seconds_since(start)}
    return Made(edit.apply(copy.deepcopy(request.model), alpha), seconds, notes)


def collected(request: Request, tokens: str, layers: LayerChoice, **options: Any) -> Pair:
    """The statistics of both pools at some tokens: a pass over each."""
    common: dict[str, Any] = {"mask": MASKS[tokens], "forward": request.forward}
    forget = unmerge.collect(request.model, request.forget, layers, what="forget", **common, **options)
    return forget, unmerge.collect(request.model, request.retain, forget, what="retain", **common)


def fitted(request: Request, variant: Variant, statistics: Pair) -> unmerge.Edit:
    """The edit of a variant."""
    init: Any = "zero" if variant.init == "zero" else request.init
    return unmerge.fit(request.model, *statistics, init=init, recipe=variant.recipe, on_verdict="ignore")


def _baseline(request: Request, name: str, times: float, seed: int) -> Made:
    start = time.perf_counter()
    options: dict[str, Any] = {"lr": times * RATE, "seed": seed}
    if name == "RMU":
        options["layer"] = min(7, request.blocks - 1)
    model = METHODS[BASELINES[name]](request.model, request.forget, request.retain, **options)
    return Made(model, request.seconds_since(start), {"lr": options["lr"]})
