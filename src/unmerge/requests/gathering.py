"""From what `fit` is given to a request: data are read here, and nowhere after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from unmerge.collecting.collection import View, collect, same_layers
from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import Forward, Mask, check_rereadable, class_labels
from unmerge.errors import DataError, StatisticsError, listing, warn
from unmerge.model.experts import expert_modules, is_routed
from unmerge.placement.state import state_of
from unmerge.recipe import PROBE_ROWS, Recipe
from unmerge.requests.request import Request
from unmerge.storage.fingerprint import fingerprint

Source = Iterable[Any] | Statistics

TOKENS_A_DIRECTION = 4  # that an expert must have seen for each direction of the recipe


def request_of(
    model: nn.Module,
    forget: Source | None,
    retain: Source | None,
    recipe: Recipe,
    classes: Sequence[int] | None,
    statistics: Statistics | None,
    mask: Mask,
    forward: Forward | None,
    view: View | None = None,
) -> Request:
    """The request that `fit`'s arguments make, its data read where they are data; of a view its layers alone."""
    if classes is not None or statistics is not None:
        if classes is None or statistics is None or forget is not None or retain is not None:
            raise DataError("classes= and statistics= go together, and in place of forget and retain.")
        if not isinstance(statistics, Statistics):
            kind = type(statistics).__name__
            raise DataError(f"statistics is a {kind}; expected Statistics: unmerge.Statistics.load(path) reads a file.")
        statistics.check_weights(fingerprint(state_of(model)) if view is None else view.weights)
        return _of_classes(statistics, classes, recipe)
    if forget is None or retain is None:
        raise DataError("fit needs forget and retain, or classes= and statistics=.")

    options: dict[str, Any] = {"mask": mask, "forward": forward, "seed": recipe.seed}
    limited = recipe.limits_rows
    if limited and not isinstance(retain, Statistics):
        check_rereadable(retain, "retain", "max_points")
    if limited and not isinstance(forget, Statistics):
        check_rereadable(forget, "forget", "max_points")
    if limited and (isinstance(forget, Statistics) or isinstance(retain, Statistics)):
        raise DataError(
            "max_points limits the rows that are read, so it needs the data, not Statistics. Pass the data, or "
            "recipe.but(max_points=None) to use every row."
        )
    forget_data: Any = forget
    retain_data: Any = retain
    nothing_read = isinstance(forget, Statistics) and isinstance(retain, Statistics)
    if not isinstance(forget, Statistics):
        choice: Any = {"layers": recipe.layers, "skip_layers": recipe.skip_layers}
        if view is not None:
            choice = {"layers": view}
        elif isinstance(retain, Statistics):
            choice = {"layers": retain}
        forget = collect(model, forget, **choice, **needed_of(recipe), **options, what="forget")
    if not isinstance(retain, Statistics):
        retain = collect(model, retain, same_layers(forget, view), **options, what="retain")
    forget, retain = _with_enough_tokens(model, forget, retain, recipe)
    request = pair_of(forget, retain, recipe)  # which also sees that both have the same weights
    if nothing_read:
        forget.check_weights(fingerprint(state_of(model)) if view is None else view.weights)
    if not limited:
        return request
    options |= {"layers": same_layers(forget, view), "max_points": recipe.max_points}
    probe_forget = collect(model, forget_data, **needed_of(recipe), **options, what="forget probes")
    unseen = _classes_without_rows(forget, probe_forget) if recipe.basis == "cav-class" else []
    if unseen:
        raise DataError(
            f"the first {recipe.max_points} rows of forget hold no sample of the classes {unseen}. Shuffle the forget "
            "batches, or use recipe.but(max_points=None)."
        )
    probe_retain = collect(model, retain_data, **options, what="retain probes")
    return replace(request, probe_forget=probe_forget, probe_retain=probe_retain)


def _with_enough_tokens(
    model: nn.Module, forget: Statistics, retain: Statistics, recipe: Recipe
) -> tuple[Statistics, Statistics]:
    """Both sides without the experts' layers to which one of them sent too few tokens to learn from."""
    experts = expert_modules(model)
    enough = TOKENS_A_DIRECTION * max(recipe.rank, recipe.retain_rank)
    starved = {}
    for name in dict.fromkeys([*forget.layers, *retain.layers]):
        if is_routed(name, experts):
            counts = [part.layers[name].moments.n if name in part.layers else 0 for part in (forget, retain)]
            if min(counts) < enough:
                starved[name] = f"is an expert's that saw fewer than {enough} forget or retain tokens"
    if starved:
        warn(
            f"{len(starved)} layers of experts are left alone: they saw fewer than {enough} forget or retain tokens "
            f"({TOKENS_A_DIRECTION} for each of the recipe's directions): {listing(starved, 4)}."
        )
    return forget.leaving_out(starved), retain.leaving_out(starved)


def pair_of(forget: Statistics, retain: Statistics, recipe: Recipe) -> Request:
    """The request of two statistics, checked for what the recipe needs of them."""
    forget.check_alike(retain, "pair")
    forget = forget.sketched(retain.sketches)
    retain = retain.sketched(forget.sketches).beside(forget)
    needed = needed_of(recipe)
    if recipe.basis == "cav-class" and not forget.classes:
        raise DataError(
            "basis='cav-class' needs a class label with every forget sample, but there are none. Give batches as "
            "(inputs, labels), or use basis='cav-kmeans'."
        )
    layers = forget.layers.values()
    if "per_class" in needed and not all(layer.class_moments for layer in layers):
        raise DataError("basis='cav-class' needs the full moments of each class: collect(..., per_class='full').")
    if "sample" in needed and not all(layer.sample is not None for layer in layers):
        raise DataError("basis='cav-kmeans' clusters a sample of rows: collect(..., sample=8192).")
    labelled = bool(forget.classes) and bool(retain.classes)
    is_class_request = labelled and not set(forget.classes) & set(retain.classes)
    return Request(forget, retain, classes=forget.classes if is_class_request else ())


def _of_classes(whole: Statistics, classes: Sequence[int], recipe: Recipe) -> Request:
    if not recipe.traits.from_classes:
        raise DataError(
            f"classes= knows only the means of what is forgotten, and basis={recipe.basis!r} needs more. "
            "Pass the forget data, or use basis='lda' or 'private-mean'."
        )
    if not whole.classes:
        raise StatisticsError("these statistics were collected without labels, so they have no classes to forget.")
    wanted = tuple(class_labels(classes))
    if any(label not in whole.classes for label in wanted):
        raise StatisticsError(f"classes={list(wanted)}: expected some of the labels {list(whole.classes)}.")
    if len(wanted) == len(whole.classes):
        raise StatisticsError("classes= names every class, so nothing is left to retain.")
    return Request(None, None, whole, wanted)


def _classes_without_rows(forget: Statistics, probes: Statistics) -> list[int]:
    """The forgotten classes of which some layer's limited rows hold none."""
    seen = {name: {probes.classes[place] for place in layer.class_moments} for name, layer in probes.layers.items()}
    return [label for label in forget.classes if not all(label in labels for labels in seen.values())]


def needed_of(recipe: Recipe) -> dict[str, Any]:
    """What collecting the forget set must keep beyond moments."""
    if recipe.basis == "cav-class":
        return {"per_class": "full"}
    if recipe.basis == "cav-kmeans":
        return {"sample": recipe.max_points or PROBE_ROWS}
    return {}
