"""Which modules can be edited, and a weight as one (out, in) matrix per group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils import parametrize

from unmerge.errors import LayerError, listing, suggest
from unmerge.recipe import LayerChoice


@dataclass(frozen=True)
class Selection:
    """The layers to edit in `named_modules()` order, and those left out by default with the reason."""

    names: list[str]
    named: bool = False  # the user listed them one by one, so each must work
    left_out: dict[str, str] = field(default_factory=dict)


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, which stores (in, out)."""
    # By name, so that transformers need not be imported.
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__
    )


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Every convolution and linear in `named_modules()` order: what `skip_layers` counts."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) or is_transposed(module)
    }


def head_of(model: nn.Module) -> str:
    """The name of the classifier: the last linear layer."""
    names = [name for name, module in candidates(model).items() if not isinstance(module, nn.Conv2d)]
    names = names or list(candidates(model))
    if not names:
        raise LayerError(
            f"{type(model).__name__} has no nn.Linear, nn.Conv2d or transformers Conv1D, so there is nothing to edit."
        )
    return names[-1]


def select(model: nn.Module, layers: LayerChoice = None, skip_layers: int | str = 0) -> Selection:
    """The layers that `layers` names, or all from `skip_layers` on and the classifier."""
    modules = candidates(model)
    head = head_of(model)
    named = False
    if layers is None:
        if skip_layers != "auto" and (not isinstance(skip_layers, int) or skip_layers < 0):
            raise LayerError(f"skip_layers={skip_layers!r} is not 'auto' or a whole number from 0.")
        body = [name for name in modules if name != head]
        skipped = _three_quarters(len(body)) if skip_layers == "auto" else int(skip_layers)
        chosen = [*body[skipped:], head]
    elif callable(layers):
        chosen = [name for name, module in modules.items() if layers(name, module)]
    elif not isinstance(layers, Iterable):
        raise LayerError(f"layers={layers!r} is not a name, a list of names, a 're:' pattern or a predicate.")
    else:
        entries = [layers] if isinstance(layers, str) else list(layers)
        if not all(isinstance(entry, str) for entry in entries):
            raise LayerError(f"layers={layers!r} holds something other than names: expected those of named_modules().")
        named = not any(entry.startswith("re:") for entry in entries)
        chosen = [name for entry in entries for name in _matching(entry, modules)]
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
    return Selection(names, named, refused)


def _refusal(name: str, module: nn.Module, owners: Mapping[int, list[str]]) -> str | None:
    """Why a layer's weight cannot be edited in place, if it cannot."""
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        return "has a parametrized weight (weight or spectral norm, LoRA), which is recomputed at every call"
    weight = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != _dimensions(module):
        found = (
            f"{weight.dtype} of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        )
        return f"has a quantised or packed weight ({found})"
    others = [other for other in owners[id(weight)] if other != name]
    if others:
        return f"shares its weight with {listing(others)}"
    return None


def tensor_name(layer: str, part: str) -> str:
    """The name of a layer's weight or bias in the state dict; a model that is one layer has no prefix."""
    return f"{layer}.{part}" if layer else part


def weight_matrix(module: nn.Module, weight: Tensor | None = None) -> Tensor:
    """A weight of the module as (out, in), or as (groups, out/groups, in) for a grouped convolution."""
    weight = module.get_parameter("weight") if weight is None else weight
    if is_transposed(module):
        return weight.mT
    if isinstance(module, nn.Conv2d):
        groups = () if module.groups == 1 else (module.groups,)
        return weight.reshape(*groups, weight.shape[0] // module.groups, -1)
    return weight


def from_matrix(matrix: Tensor, like: Tensor, transposed: bool) -> Tensor:
    """The matrix in the layout of the weight `like`: the inverse of `weight_matrix`."""
    return matrix.mT if transposed else matrix.reshape(like.shape)


def _dimensions(module: nn.Module) -> int:
    return 4 if isinstance(module, nn.Conv2d) else 2


def _three_quarters(count: int) -> int:
    return count - max(1, count // 4) if count else 0


def _matching(entry: str, modules: Mapping[str, nn.Module]) -> list[str]:
    if not entry.startswith("re:"):
        if entry not in modules:
            raise LayerError(
                f"there is no editable layer {entry!r}. {suggest(entry, modules)} For a pattern write 're:{entry}'."
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
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].append(name)
    return owners
