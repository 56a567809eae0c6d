"""From what `fit` is given to a request: data are read here; after it only the verdict's random control is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from unmerge.collecting.collection import View, collect, same_layers
from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import Forward, Mask, check_rereadable, class_labels
from unmerge.distributed.warning import warn
from unmerge.errors import DataError, StatisticsError, listing
from unmerge.model.experts import expert_modules, is_routed
from unmerge.model.layers import device_of_layer
from unmerge.placement.state import state_of
from unmerge.recipe import PROBE_ROWS, Recipe
from unmerge.requests.request import Request
from unmerge.storage.fingerprint import fingerprint

Source = Iterable[Any] | Statistics

TOKENS_A_DIRECTION = 4  # that an expert must have seen for each direction of the recipe


@dataclass(frozen=True)
class Sources:
    """What `fit` is given of data, and how it is read."""

    forget: Source | None
    retain: Source | None
    classes: Sequence[int] | None
    statistics: Statistics | None
    mask: Mask
    forward: Forward | None

    @property
    def given(self) -> Statistics | None:
        """Statistics that are there already, if there are any."""
        sources = (self.statistics, self.retain, self.forget)
        return next((source for source in sources if isinstance(source, Statistics)), None)

    def request(self, model: nn.Module, recipe: Recipe, view: View | None = None) -> Request:
        """The request, its data read where they are data; of a view its layers alone."""
        if self.classes is not None or self.statistics is not None:
            return self._of_classes(model, recipe, view)
        if self.forget is None or self.retain is None:
            raise DataError("fit needs forget and retain, or classes= and statistics=.")
        if recipe.limits_rows:
            self._check_rows_can_be_limited()
        options: dict[str, Any] = {"mask": self.mask, "forward": self.forward, "seed": recipe.seed}
        forget, retain = (_part(source, view, model) for source in (self.forget, self.retain))
        if not isinstance(forget, Statistics):
            choice: Any = {"layers": recipe.layers, "skip_layers": recipe.skip_layers}
            if view is not None:
                choice = {"layers": view}
            elif isinstance(retain, Statistics):
                choice = {"layers": retain}
            forget = collect(model, forget, **choice, **needed_of(recipe), **options, what="forget")
        if not isinstance(retain, Statistics):
            retain = collect(model, retain, same_layers(forget, view), **options, what="retain")
        request = pair_of(model, forget, retain, recipe)  # which also sees that both have the same weights
        if isinstance(self.forget, Statistics) and isinstance(self.retain, Statistics):
            forget.check_weights(fingerprint(state_of(model)) if view is None else view.weights)
        if not recipe.limits_rows:
            return request
        assert request.forget is not None
        data: tuple[Any, Any] = (self.forget, self.retain)
        options |= {"layers": same_layers(request.forget, view), "max_points": recipe.max_points}
        probe_forget = collect(model, data[0], **needed_of(recipe), **options, what="forget probes")
        unseen = _classes_without_rows(request.forget, probe_forget) if recipe.traits.keeps == "classes" else []
        if unseen:
            raise DataError(
                f"the first {recipe.max_points} rows of forget hold no sample of the classes {unseen}. Shuffle the "
                "forget batches, or use recipe.but(max_points=None)."
            )
        probe_retain = collect(model, data[1], **options, what="retain probes")
        return replace(request, probe_forget=probe_forget, probe_retain=probe_retain)

    def _of_classes(self, model: nn.Module, recipe: Recipe, view: View | None) -> Request:
        if self.classes is None or self.statistics is None or self.forget is not None or self.retain is not None:
            raise DataError("classes= and statistics= go together, and in place of forget and retain.")
        if not isinstance(self.statistics, Statistics):
            kind = type(self.statistics).__name__
            raise DataError(f"statistics is a {kind}; expected Statistics: unmerge.Statistics.load(path) reads a file.")
        whole = _part(self.statistics, view, model)
        whole.check_weights(fingerprint(state_of(model)) if view is None else view.weights)
        return _of_classes(whole, self.classes, recipe)

    def _check_rows_can_be_limited(self) -> None:
        for source, what in ((self.retain, "retain"), (self.forget, "forget")):
            if not isinstance(source, Statistics):
                check_rereadable(source, what, "max_points")
        if isinstance(self.forget, Statistics) or isinstance(self.retain, Statistics):
            raise DataError(
                "max_points limits the rows that are read, so it needs the data, not Statistics. Pass the data, or "
                "recipe.but(max_points=None) to use every row."
            )


def _part(source: Any, view: View | None, model: nn.Module) -> Any:
    """The layers of the view, each where the model computes it, sketched where the view says so; data as they are."""
    if view is None or not isinstance(source, Statistics):
        return source
    names = view.selection.names
    sketches = {name: view.sketches[name] for name in names if name in view.sketches}
    return source.only(*names).sketched(sketches).at({name: device_of_layer(model, name) for name in names})


def pair_of(model: nn.Module, forget: Statistics, retain: Statistics, recipe: Recipe) -> Request:
    """The request of two statistics: checked for what the recipe needs of them, without experts that saw too little."""
    forget, retain = _with_enough_tokens(model, forget, retain, recipe)
    forget.check_alike(retain, "pair")
    forget = forget.sketched(retain.sketches)
    retain = retain.sketched(forget.sketches).beside(forget)
    of_classes, of_rows = (recipe.traits.keeps == what for what in ("classes", "rows"))
    if of_classes and not forget.classes:
        raise DataError(
            f"basis={recipe.basis!r} needs a class label with every forget sample, but there are none. Give batches as "
            "(inputs, labels), or use basis='cav-kmeans'."
        )
    layers = forget.layers.values()
    if of_classes and not all(layer.class_moments for layer in layers):
        raise DataError(f"basis={recipe.basis!r} needs the full moments of each class: collect(..., per_class='full').")
    if of_rows and not all(layer.sample is not None for layer in layers):
        raise DataError(f"basis={recipe.basis!r} clusters a sample of rows: collect(..., sample=8192).")
    labelled = bool(forget.classes) and bool(retain.classes)
    is_class_request = labelled and not set(forget.classes) & set(retain.classes)
    return Request(forget, retain, classes=forget.classes if is_class_request else ())


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
    if recipe.traits.keeps == "classes":
        return {"per_class": "full"}
    if recipe.traits.keeps == "rows":
        return {"sample": recipe.max_points or PROBE_ROWS}
    return {}
