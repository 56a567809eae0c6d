"""Watching the calls of layers: of modules, of experts that are modules, and of slices of fused experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.model.experts import (
    Routed,
    calls_of,
    expert_modules,
    expert_with,
    matching_rows,
    reproduces,
    routing_of,
    slices_of,
    tensor_and_place,
)

Hook = Callable[[str, nn.Module, Tensor, Tensor, Routed | None], None]


@contextmanager
def hooked(model: nn.Module, names: Sequence[str], hook: Hook) -> Iterator[None]:
    """Call `hook(name, module, input, output, routed)` after each call of the named layers.

    routed: which tokens the input's rows are, for a layer of an expert; None where they are all in order.
    """
    modules = [name for name in names if tensor_and_place(name) is None]
    with ExitStack() as stack:
        tokens = stack.enter_context(_followed(model, modules))
        for name in modules:
            handle = model.get_submodule(name).register_forward_hook(_module_hook(name, hook, tokens), with_kwargs=True)
            stack.callback(handle.remove)
        for owner, wanted in _by_owner(names).items():
            module = model.get_submodule(owner)
            handle = module.register_forward_hook(_slices_hook(owner, module, wanted, hook), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def checked_experts(model: nn.Module, names: Sequence[str], wrong: set[str]) -> Iterator[None]:
    """Add to `wrong` the slices of modules that do something else with their experts than is known here."""

    def check(wanted: set[str]) -> Callable[..., None]:
        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not reproduces(module, args, kwargs, output):
                wrong.update(wanted)

        return call

    with ExitStack() as stack:
        for owner, wanted in _by_owner(names).items():
            handle = model.get_submodule(owner).register_forward_hook(check(wanted), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _by_owner(names: Sequence[str]) -> dict[str, set[str]]:
    """The slices among some layers by the module that holds them."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        place = tensor_and_place(name)
        if place is not None:
            found[place[0].rpartition(".")[0]].add(name)
    return found


def _module_hook(name: str, hook: Hook, tokens: dict[str, Routed]) -> Callable[..., None]:
    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        given: Tensor = args[0] if args else kwargs["x" if "x" in kwargs else "input"]
        # Autocast would turn float32 products inside the hook into half precision.
        with torch.autocast(given.device.type, enabled=False):
            hook(name, module, given, output, tokens.get(name))

    return call


def _slices_hook(owner: str, module: nn.Module, wanted: set[str], hook: Hook) -> Callable[..., None]:
    slices = {name: part for name, part in slices_of(owner, module).items() if name in wanted}
    experts = {place[1] for name in wanted if (place := tensor_and_place(name)) is not None}

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        routing = routing_of(args, kwargs)
        if routing is None:
            return
        hidden, chosen, _ = routing
        for part in calls_of(module, hidden, chosen, experts):
            name = f"{owner}.{part.part}[{part.expert}]" if owner else f"{part.part}[{part.expert}]"
            if name in slices:
                with torch.autocast(hidden.device.type, enabled=False):
                    hook(name, slices[name], part.inputs, part.output, Routed(part.rows, len(hidden)))

    return call


@contextmanager
def _followed(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Routed]]:
    """For each layer inside an expert that is a module, the tokens that the expert was called with."""
    inside: dict[str, list[str]] = defaultdict(list)
    routers = expert_modules(model)
    for name in names:
        expert = expert_with(name, routers)
        if expert is not None:
            inside[expert].append(name)
    found: dict[str, Routed] = {}
    seen: dict[str, Tensor] = {}  # the hidden states that a router was given, as rows

    def note(router: str) -> Callable[..., None]:
        def call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            seen[router] = given.reshape(-1, given.shape[-1])

        return call

    def follow(expert: str, router: str) -> Callable[..., None]:
        def call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            rows = matching_rows(given.reshape(-1, given.shape[-1]), seen[router])
            found.update(dict.fromkeys(inside[expert], Routed(rows, len(seen[router]))))

        return call

    with ExitStack() as stack:
        for router in {routers[expert] for expert in inside}:
            handle = model.get_submodule(router).register_forward_pre_hook(note(router), with_kwargs=True)
            stack.callback(handle.remove)
        for expert in inside:
            module = model.get_submodule(expert)
            handle = module.register_forward_pre_hook(follow(expert, routers[expert]), with_kwargs=True)
            stack.callback(handle.remove)
        yield found
