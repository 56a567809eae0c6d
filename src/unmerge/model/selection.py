"""Which layers a request edits: by name, shorthand, pattern, predicate or depth, and those that cannot be edited."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from torch import Tensor, nn
from torch.nn.utils import parametrize

from unmerge.errors import LayerError, listing, suggest
from unmerge.model.experts import Slice
from unmerge.model.layers import candidates, carries_adapters, head_among, is_transposed, stored_weight
from unmerge.model.shorthands import SYNTAX, expanded, is_shorthand
from unmerge.placement.offloading import identity_of
from unmerge.recipe import LayerChoice


@dataclass(frozen=True)
class Selection:
    """The layers to edit in `named_modules()` order, and those left out by default with the reason."""

    names: list[str]
    named: bool = False  # the user listed them one by one, so each must work
    skipped: int | str | None = None  # `skip_layers`, where it decided
    left_out: dict[str, str] = field(default_factory=dict)


def last_quarter(model: nn.Module, head: str | None = None) -> list[str]:
    """What `skip_layers="auto"` takes, whether it can be edited or not; head: the classifier, where it is known."""
    modules = candidates(model)
    return _from_depth(modules, head or head_among(modules, model), "auto")


def select(
    model: nn.Module, layers: LayerChoice = None, skip_layers: int | str = 0, head: str | None = None
) -> Selection:
    """The layers that `layers` names, or all from `skip_layers` on and the classifier: `head`, or the last linear."""
    if carries_adapters(model):
        raise LayerError(
            "the model carries PEFT adapters, so its weights are in two places. Type: "
            "from unmerge.interop.peft import merged; model, init = merged(model)"
        )
    modules = candidates(model)
    head = head or head_among(modules, model)
    named = False
    if layers is None:
        if skip_layers != "auto" and (not isinstance(skip_layers, int) or skip_layers < 0):
            raise LayerError(f"skip_layers={skip_layers!r} is not 'auto' or a whole number from 0.")
        chosen = _from_depth(modules, head, skip_layers)
    elif callable(layers):
        chosen = [name for name, module in modules.items() if layers(name, module)]
    elif not isinstance(layers, Iterable):
        raise LayerError(
            f"layers={layers!r} is not a name, a list of names, a shorthand ({SYNTAX}), a 're:' pattern or a predicate."
        )
    else:
        entries = [layers] if isinstance(layers, str) else list(layers)
        if not all(isinstance(entry, str) for entry in entries):
            raise LayerError(f"layers={layers!r} holds something other than names: expected those of named_modules().")
        named = not any(entry.startswith("re:") or is_shorthand(entry) for entry in entries)
        chosen = [name for entry in entries for name in _matching(entry, model, modules)]
    chosen = [name for name in modules if name in set(chosen)]
    if not chosen:
        raise LayerError(f"layers={layers!r} selects none of the {len(modules)} layers: {listing(modules)}.")

    owners = _owners(model)
    refused = {name: reason for name in chosen if (reason := _refusal(name, modules[name], owners))}
    if refused and named:
        name, reason = next(iter(refused.items()))
        raise LayerError(f"layer {name!r} {reason}. Leave it out of layers=...")
    names = [name for name in chosen if name not in refused]
    if not names:
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in refused.items())
        raise LayerError(f"none of the selected layers can be edited: {reasons}.")
    return Selection(names, named, skip_layers if layers is None else None, refused)


def _refusal(name: str, module: nn.Module, owners: Mapping[int, list[str]]) -> str | None:
    """Why a layer's weight cannot be edited in place, if it cannot."""
    if parametrize.is_parametrized(module) or not ("weight" in module._parameters or isinstance(module, Slice)):
        return "has a parametrized weight (weight or spectral norm, LoRA), which is recomputed at every call"
    weight = stored_weight(module)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != _dimensions(module):
        found = (
            f"{weight.dtype} of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        )
        return f"has a quantised or packed weight ({found})"
    others = [] if isinstance(module, Slice) else owners[identity_of(module, "weight")]
    others = [other for other in others if other != name]
    if others:
        return f"shares its weight with {listing(others)}"
    return None


def _from_depth(modules: Iterable[str], head: str, skip_layers: int | str) -> list[str]:
    """All layers from a depth on, and the classifier; "auto" takes the last quarter."""
    body = [name for name in modules if name != head]
    quarter = max(1, len(body) // 4) if body else 0
    return [*body[len(body) - quarter if skip_layers == "auto" else int(skip_layers) :], head]


def _matching(entry: str, model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    if is_shorthand(entry):
        return expanded(entry, model, modules, lambda name: _widths(modules[name]))
    if not entry.startswith("re:"):
        if entry not in modules:
            raise LayerError(
                f"there is no editable layer {entry!r}. {suggest(entry, modules)} For a pattern write 're:{entry}'; "
                f"transformers also know {SYNTAX}."
            )
        return [entry]
    try:
        pattern = re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise LayerError(f"{entry!r} is no regular expression: {error}.") from error
    found = [name for name in modules if pattern.search(name)]
    if not found:
        raise LayerError(f"the pattern {entry!r} matches none of the layers: {listing(modules)}.")
    return found


def _owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for part, parameter in module._parameters.items():
            if parameter is not None:
                owners[identity_of(module, part)].append(name)
    return owners


def _widths(module: nn.Module) -> tuple[int, int]:
    """How many outputs and inputs a layer has; none where its weight is no matrix."""
    weight = stored_weight(module)
    shape = weight.shape if isinstance(weight, Tensor) and weight.dim() > 1 else (0, 0)
    return (shape[1], shape[0]) if is_transposed(module) else (shape[0], prod(shape[1:]))


def _dimensions(module: nn.Module) -> int:
    return 4 if isinstance(module, nn.Conv2d) else 2
