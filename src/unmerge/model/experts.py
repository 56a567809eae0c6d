"""Mixtures of experts: each expert sees the tokens that are routed to it.

Experts are modules in a list, or slices of weights (experts, out, in) that one module holds for all of them. A slice is
a layer too, under the name of its tensor and its place: "model.layers.0.mlp.experts.down_proj[3]".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unmerge.placement.offloading import parameter_of

_SLICE = re.compile(r"(?P<tensor>.+)\[(?P<place>\d+)\]")
_EXPERT = re.compile("expert", re.IGNORECASE)
_TOLERANCE = 5e-2  # of half precision; a layer of another kind is off by more


class Routed(NamedTuple):
    """Which tokens of a batch a layer's rows are."""

    rows: Tensor | None  # places among all tokens, sample by sample; None where that is not known
    tokens: int  # how many there are


class Slice(nn.Module):
    """One expert's matrix of a weight that holds those of all."""

    bias = None

    def __init__(self, owner: nn.Module, part: str, place: int) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that it does not become a child
        self._part, self._place = part, place

    @property
    def weight(self) -> Tensor:
        return parameter_of(self._owner[0], self._part)[self._place]

    def get_parameter(self, target: str) -> Any:
        """The weight as it is, also on the meta device."""
        if target != "weight":
            return super().get_parameter(target)
        return self._owner[0].get_parameter(self._part)[self._place]

    @property
    def is_transposed(self) -> bool:
        """Whether it is stored as (in, out)."""
        return bool(getattr(self._owner[0], "is_transposed", False))


class Call(NamedTuple):
    """What one expert's slice received and returned."""

    part: str
    expert: int
    rows: Tensor
    inputs: Tensor
    output: Tensor


def tensor_and_place(layer: str) -> tuple[str, int] | None:
    """The tensor that a slice is part of and its place there; None for a layer that is a module."""
    found = _SLICE.fullmatch(layer)
    return None if found is None else (found["tensor"], int(found["place"]))


def fused_parts(module: nn.Module) -> list[str]:
    """The weights of all experts that a module holds, in the order of their use."""
    known = ("gate_up_proj", "up_proj", "down_proj")
    parts: list[str] = [part for part in known if part in module._parameters]
    is_fused = len(parts) == 2 and parts[1] == "down_proj"
    return parts if is_fused and all(module.get_parameter(part).dim() == 3 for part in parts) else []


def slices_of(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The layers inside a module with the weights of all experts."""
    return {
        f"{name}.{part}[{place}]" if name else f"{part}[{place}]": Slice(module, part, place)
        for part in fused_parts(module)
        for place in range(len(module.get_parameter(part)))
    }


def calls_of(
    module: nn.Module, hidden: Tensor, chosen: Tensor, wanted: Collection[int] | None = None
) -> Iterator[Call]:
    """What the slices of the wanted experts (None: all) are given for hidden states (tokens, in) and their experts."""
    first, second = fused_parts(module)
    experts = len(module.get_parameter(first))
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=experts).tolist()
    for expert, places in enumerate((order // chosen.shape[-1]).split(counts)[:experts]):
        if len(places) == 0 or (wanted is not None and expert not in wanted):
            continue
        inputs = hidden[places]
        output = _linear(module, first, expert, inputs)
        yield Call(first, expert, places, inputs, output)
        inputs = _activated(module, output)
        yield Call(second, expert, places, inputs, _linear(module, second, expert, inputs))


def routing_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The hidden states, the experts of each token and their weights that a module of experts was called with."""
    values = [*args, *kwargs.values()]
    if len(values) != 3 or not all(isinstance(value, Tensor) and value.dim() == 2 for value in values):
        return None
    hidden, chosen, weights = values
    return (hidden, chosen, weights) if chosen.shape == weights.shape and not chosen.is_floating_point() else None


def reproduces(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether the calls that `calls_of` takes a module apart into give what it returned."""
    routing = routing_of(args, kwargs)
    if routing is None or not isinstance(output, Tensor):
        return False
    hidden, chosen, weights = routing
    found = torch.zeros(output.shape, dtype=torch.float64, device=output.device)
    for call in calls_of(module, hidden, chosen):
        if call.part == "down_proj":
            share = (weights * (chosen == call.expert)).sum(-1)[call.rows].double()
            found.index_add_(0, call.rows, share.unsqueeze(-1) * call.output.double())
    return bool((found - output).norm() <= _TOLERANCE * output.double().norm() + 1e-6)


def expert_modules(model: nn.Module) -> dict[str, str]:
    """The experts that are modules by name, each with the name of the module that routes tokens to it."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        place, _, key = name.rpartition(".")
        if isinstance(module, nn.ModuleList) and _EXPERT.search(key):
            found |= {f"{name}.{child}": place for child, _ in module.named_children()}
    return found


def expert_with(layer: str, experts: Collection[str]) -> str | None:
    """The expert among some that are modules in which a layer stands."""
    parts = layer.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((name for name in above if name in experts), None)


def is_routed(layer: str, experts: Collection[str]) -> bool:
    """Whether a layer sees routed tokens; `experts`: the names of those that are modules."""
    return tensor_and_place(layer) is not None or expert_with(layer, experts) is not None


def matching_rows(rows: Tensor, among: Tensor) -> Tensor | None:
    """The places of some rows among all, equal ones in their order; None where one is not there."""
    keys, all_keys = _keys(rows), _keys(among)
    order = all_keys.argsort(stable=True)
    in_order = all_keys[order]
    own_order = keys.argsort(stable=True)
    own = keys[own_order]
    earlier_equals = torch.arange(len(own), device=own.device) - torch.searchsorted(own, own)
    places = torch.searchsorted(in_order, own) + earlier_equals
    if len(in_order) == 0 or bool((places >= len(in_order)).any()) or not torch.equal(in_order[places], own):
        return None
    return torch.empty_like(own_order).index_copy_(0, own_order, order[places])


def _keys(rows: Tensor) -> Tensor:
    """A number for each row's bits."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    words = rows.contiguous().view(whole).to(torch.int64)
    # Odd factors; sums of whole numbers wrap and do not depend on their order.
    factors = torch.arange(words.shape[-1], device=words.device).mul_(0x9E3779B97F4A7C1).add_(1).bitwise_or_(1)
    return (words * factors).sum(-1)


def _linear(module: nn.Module, part: str, expert: int, inputs: Tensor) -> Tensor:
    weight = parameter_of(module, part)[expert].to(inputs.device)
    weight = weight.mT if getattr(module, "is_transposed", False) else weight
    has_bias = f"{part}_bias" in module._parameters
    bias = parameter_of(module, f"{part}_bias")[expert].to(inputs.device) if has_bias else None
    return functional.linear(inputs, weight, bias)


def _activated(module: Any, output: Tensor) -> Tensor:
    """What lies between the two products of an expert."""
    if "up_proj" in module._parameters:
        return module.act_fn(output)
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(output)
    gate, up = output.chunk(2, dim=-1)
    return module.act_fn(gate) * up
