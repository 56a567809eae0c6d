"""Which modules can be edited, and a weight as one (out, in) matrix per group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from unmerge.errors import LayerError, listing, suggest
from unmerge.model.experts import Slice, slices_of, tensor_and_place
from unmerge.model.shorthands import SYNTAX, expanded, is_shorthand
from unmerge.placement.offloading import execution_device, identity_of, parameter_of
from unmerge.recipe import LayerChoice


@dataclass(frozen=True)
class Selection:
    """The layers to edit in `named_modules()` order, and those left out by default with the reason."""

    names: list[str]
    named: bool = False  # the user listed them one by one, so each must work
    skipped: int | str | None = None  # `skip_layers`, where it decided
    left_out: dict[str, str] = field(default_factory=dict)


def is_transposed(module: nn.Module) -> bool:
    """Whether the module stores (in, out): transformers' Conv1D and some experts do."""
    if isinstance(module, Slice):
        return module.is_transposed
    # By name, so that transformers need not be imported.
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__
    )


def carries_adapters(model: nn.Module) -> bool:
    """Whether a layer is wrapped by PEFT, so that its weight is not all of it."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    return any(base.__name__ == "BaseTunerLayer" and base.__module__.startswith("peft.") for base in kinds)


def beyond_lora(module: nn.Module) -> str | None:
    """What keeps PEFT's LoRA from holding a change of this layer, if anything does."""
    if isinstance(module, Slice):
        return "a weight of several experts"
    if not isinstance(module, nn.Conv2d):
        return None
    found = {
        f"{module.groups} groups": module.groups > 1,
        f"dilation {module.dilation}": module.dilation != (1, 1),
        f"padding of {module.padding_mode!r}": module.padding_mode != "zeros",
    }
    return ", ".join(reason for reason, holds in found.items() if holds) or None


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Every convolution, linear and expert's slice in `named_modules()` order: what `skip_layers` counts."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) or is_transposed(module):
            found[name] = module
        elif module._parameters:  # of its own
            found |= slices_of(name, module)
    return found


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """The module of a layer, or the slice of an expert."""
    place = tensor_and_place(name)
    if place is None:
        return model.get_submodule(name)
    owner, _, part = place[0].rpartition(".")
    return Slice(model.get_submodule(owner), part, place[1])


def device_of_layer(model: nn.Module, name: str) -> torch.device:
    """Where a layer computes: a model may be spread over several devices."""
    module = layer_of(model, name)
    device = module.get_parameter("weight").device
    if device.type != "meta":
        return device
    return execution_device(module) or execution_device(model) or device


def head_of(model: nn.Module) -> str:
    """The name of the classifier: the last linear layer."""
    return _head_among(candidates(model), model)


def last_quarter(model: nn.Module, head: str | None = None) -> list[str]:
    """What `skip_layers="auto"` takes, whether it can be edited or not; head: the classifier, where it is known."""
    modules = candidates(model)
    return _from_depth(modules, head or _head_among(modules, model), "auto")


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
    head = head or _head_among(modules, model)
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
    weight = _weight_of(module)
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


def tensor_name(layer: str, part: str) -> str:
    """The name of a layer's weight or bias in the state dict; a model that is one layer has no prefix.

    The weight of an expert's slice is the tensor of all experts (`weight_in` takes its part of it).
    """
    place = tensor_and_place(layer)
    if place is not None and part == "weight":
        return place[0]
    return f"{layer}.{part}" if layer else part


def weight_in(state: Mapping[str, Tensor], layer: str) -> Tensor:
    """A layer's weight in a state dict; of an expert its part."""
    place = tensor_and_place(layer)
    weight = state[tensor_name(layer, "weight")]
    if place is None:
        return weight
    if place[1] >= len(weight):
        raise LayerError(f"there is no {layer}: the model has {len(weight)} experts there.")
    return weight[place[1]]


def weight_matrix(module: nn.Module, weight: Tensor | None = None) -> Tensor:
    """A weight of the module as (out, in), or as (groups, out/groups, in) for a grouped convolution."""
    if weight is None:
        weight = module.weight if isinstance(module, Slice) else parameter_of(module, "weight")
    if is_transposed(module):
        return weight.mT
    if isinstance(module, nn.Conv2d):
        groups = () if module.groups == 1 else (module.groups,)
        return weight.reshape(*groups, weight.shape[0] // module.groups, -1)
    return weight


def from_matrix(matrix: Tensor, like: Tensor, transposed: bool) -> Tensor:
    """The matrix in the layout of the weight `like`: the inverse of `weight_matrix`."""
    return matrix.mT if transposed else matrix.reshape(like.shape)


def _weight_of(module: nn.Module) -> object:
    """What a layer calls its weight, a tensor or not, as it is stored."""
    return module.get_parameter("weight") if isinstance(module, Slice) else module.weight


def _widths(module: nn.Module) -> tuple[int, int]:
    """How many outputs and inputs a layer has; none where its weight is no matrix."""
    weight = _weight_of(module)
    shape = weight.shape if isinstance(weight, Tensor) and weight.dim() > 1 else (0, 0)
    return (shape[1], shape[0]) if is_transposed(module) else (shape[0], prod(shape[1:]))


def _dimensions(module: nn.Module) -> int:
    return 4 if isinstance(module, nn.Conv2d) else 2


def _head_among(modules: Mapping[str, nn.Module], model: nn.Module) -> str:
    names = [name for name, module in modules.items() if not isinstance(module, nn.Conv2d)] or list(modules)
    if not names:
        raise LayerError(
            f"{type(model).__name__} has no nn.Linear, nn.Conv2d or transformers Conv1D, so there is nothing to edit."
        )
    return names[-1]


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
