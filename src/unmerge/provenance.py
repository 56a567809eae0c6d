"""What an edit says of itself: the head's rows it takes out, its strength, and where it comes from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unmerge.data.batches import device_of
from unmerge.diagnosing.verdict import Verdict
from unmerge.distributed.warning import warn
from unmerge.editing.edit import Edit
from unmerge.errors import listing, reasons
from unmerge.model.initial import Init
from unmerge.model.layers import layer_of
from unmerge.model.selection import last_quarter
from unmerge.recipe import Recipe
from unmerge.requests.request import Request
from unmerge.solving.fitting import Fitted
from unmerge.solving.settling import Settled
from unmerge.version import VERSION

LOW_SHARE = 0.9  # of the variance that a sketch should hold


def finished_edit(
    model: nn.Module,
    request: Request,
    settled: Settled,
    fitted: Fitted,
    *,
    asked: Recipe,
    init: Init,
    verdict: Verdict | None,
    edits_set_aside: bool,
    seconds: Mapping[str, float],
) -> Edit:
    """The edit of these layers with all that is recorded beside it; `asked` is the recipe before "auto" was settled."""
    recipe, layers = settled.recipe, fitted.layers
    names = [name for name in settled.names if name in request.statistics.shift_to]
    head, statistics = settled.head, request.statistics
    notes: dict[str, Any] = {
        "left_out": {
            **statistics.left_out,
            **dict.fromkeys(settled.unchanged, "has the same weight in init: fine-tuning left it alone"),
        },
        "spanned_by_retain": [name for name in names if name not in layers or not layers[name].rank],
        "mean_left_free": [name for name in layers if recipe.mean == "auto" and statistics.shift_to[name] is None],
        "head_not_removed": head.why_kept,
        "rank_reduced": {},
        "approximations": [],
    }
    if request.whole is not None and not recipe.traits.of_means:
        notes["approximations"].append("retain eigenvectors: all data less the means of the forgotten classes")
    if recipe.traits.ranked:
        notes["rank_reduced"] = {name: layer.rank for name, layer in layers.items() if layer.rank < recipe.rank}
    if notes["rank_reduced"] and asked.basis != "auto":
        shown = listing(f"{name} to {rank}" for name, rank in notes["rank_reduced"].items())
        warn(f"rank={recipe.rank} is more than the data supports and was reduced: {shown}.")
    if edits_set_aside:
        notes["approximations"].append("fitted on the weights from before the edits that the model carried")
    if fitted.sketches:
        notes["sketches"] = {name: dict(facts) for name, facts in fitted.sketches.items()}
        notes["approximations"] += _sketch_words(fitted.sketches)
    samples = {"forget": request.forget, "retain": request.retain, "all": request.whole}
    is_auto = asked.layers is None and asked.skip_layers == "auto"
    deep = set(last_quarter(model, head.name)) if is_auto else set()
    missing = {name: reason for name, reason in notes["left_out"].items() if name in deep}
    if missing and list(layers) == [head.name]:
        warn(
            f"of the last quarter of the layers only the classifier {head.name!r} is edited, so that no feature "
            f"changes: {reasons(missing)}. Name other layers: Recipe(layers=...)."
        )
    edit = Edit(
        layers=layers,
        recipe=recipe.but(layers=names) if callable(recipe.layers) else recipe,
        alpha=recipe.alpha if recipe.alpha is not None else 1.0 if head.removed or fitted.keeps_rows else None,
        head=head.name if head.name in layers else None,
        removed=head.removed,
        provenance={
            "unmerge": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(device_of(model)),
            "samples": {name: part.samples for name, part in samples.items() if part is not None},
            "classes": list(request.classes),
            "init": str(init) if isinstance(init, (str, Path)) else type(init).__name__,
            "seconds": {phase: round(value, 4) for phase, value in seconds.items()},
            "verdict": None if verdict is None else asdict(verdict),
            "choices": _choices(
                request,
                settled,
                fitted,
                asked,
                by_depth=set(names) <= deep,
                grows=any(isinstance(layer_of(model, name), nn.Conv2d) for name in names),
            ),
            "notes": notes,
        },
    )
    return replace(edit, weights={name: statistics.weights[name] for name in edit.touched})


def _sketch_words(sketches: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each sketched layer; a warning where a sketch holds little of the variance."""
    shares = {name: min(share for side, share in facts.items() if side != "size") for name, facts in sketches.items()}
    low = {name: share for name, share in shares.items() if share < LOW_SHARE}
    if low:
        shown = listing(f"{name or '(model)'} {share:.0%}" for name, share in low.items())
        warn(
            f"the sketches of {len(low)} layers hold less than {LOW_SHARE:.0%} of their inputs' variance, so weak "
            f"directions are not seen: {shown}. Pass a larger memory=."
        )
    return [
        f"{name or '(model)'}: a sketch of size {sketches[name]['size']}, {share:.1%} of the variance"
        for name, share in shares.items()
    ]


def _choices(
    request: Request, settled: Settled, fitted: Fitted, asked: Recipe, by_depth: bool, grows: bool
) -> dict[str, str]:
    """What the recipe left open, what was chosen, and why."""
    recipe, head, layers = settled.recipe, settled.head, fitted.layers
    chosen = {}
    if asked.basis == "auto":
        several = "without labels the forget set may be several concepts, and one mean is one direction"
        why = {
            "blend": "blend: 1.32 times the mean of lda and private-mean, whose features are nearest to retraining"
            + (", in convolutions growing with depth to all of that in the last" if grows else ""),
            "lda": "lda: one direction for each label of the forget set",
            "wiener": f"wiener: {several}",
            "contrastive": f"contrastive: {several}",
        }
        chosen["basis"] = why[recipe.basis]
        if recipe.traits.ranked:
            chosen["rank"] = f"{recipe.rank}: fewer directions forget less, and more bring nothing"
        if recipe.basis == "wiener":
            chosen["lambda"] = f"{recipe.lam:g}: between 1 and 10 little changes, and more forgets less"
        elif not recipe.traits.closed:
            chosen["lambda"] = f"{recipe.lam:g}: less costs retain accuracy, and more brings nothing"
    if asked.layers is None and asked.skip_layers == "auto":
        count = sum(name in request.statistics.shift_to for name in settled.names)
        where = "the last quarter and the classifier, where classes are told apart" if by_depth else "those collected"
        chosen["layers"] = f"{count} layers: {where}"
    if recipe.mean == "auto":
        kept = [name for name in layers if request.statistics.shift_to[name] is not None]
        chosen["mean"] = f"preserved in {len(kept)} of {len(layers)} layers, where a bias or a BatchNorm takes it"
    if recipe.head == "auto":
        gone = f"rows {list(head.removed)} removed: no retained sample has these classes"
        chosen["head"] = gone if head.removed else f"edited, no row removed: {head.why_kept}"
    if asked.alpha is None:
        known = "1: the forgotten part of the features goes"
        if head.removed:
            known += ", and the head's rows are removed"
        elif fitted.keeps_rows:
            times = "" if recipe.head_strength == 1 else f"{recipe.head_strength:g} times "
            known += f", and the outputs of the classes fall by {times}what their own means give them"
        else:
            known = "open: search_alpha finds the smallest that forgets"
        chosen["alpha"] = known
    return chosen
