"""Which modules are layers, and a weight as one (out, in) matrix per group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unmerge.errors import LayerError
from unmerge.model.experts import Slice, slices_of, tensor_and_place
from unmerge.placement.offloading import execution_device, parameter_of


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
    return head_among(candidates(model), model)


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


def stored_weight(module: nn.Module) -> object:
    """What a layer calls its weight, a tensor or not, as it is stored."""
    return module.get_parameter("weight") if isinstance(module, Slice) else module.weight


def head_among(modules: Mapping[str, nn.Module], model: nn.Module) -> str:
    names = [name for name, module in modules.items() if not isinstance(module, nn.Conv2d)] or list(modules)
    if not names:
        raise LayerError(
            f"{type(model).__name__} has no nn.Linear, nn.Conv2d or transformers Conv1D, so there is nothing to edit."
        )
    return names[-1]
