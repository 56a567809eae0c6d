"""Weights that accelerate keeps off the device (`device_map="auto"`) and brings there for each call of their module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.errors import EditError, LayerError, listing
from unmerge.placement.sharded import whole


def parameter_of(module: nn.Module, part: str) -> Tensor:
    """A parameter of a module, also where it is offloaded, or spread over processes."""
    own = module.get_parameter(part)
    if not own.is_meta:
        return whole(own)
    value = _stored(module, part)
    if value is None:
        raise LayerError(f"{type(module).__name__} has its {part!r} on the meta device: the model was never loaded.")
    return value


def identity_of(module: nn.Module, part: str) -> int:
    """A number that two names of one parameter share."""
    own = module.get_parameter(part)
    if not own.is_meta:
        return id(own)
    kept = _in_memory(lambda: _stored(module, part))
    return id(own) if kept is None else kept.data_ptr()


class Offloaded(Mapping[str, Tensor]):
    """A model's tensors by name; what is kept elsewhere is read when it is asked for, since all may not fit."""

    def __init__(self, model: nn.Module, placed: Mapping[str, Tensor]) -> None:
        self._model = model
        self.placed = placed  # as the model has them: on the meta device where they are kept elsewhere

    def __getitem__(self, name: str) -> Tensor:
        own = self.placed[name]
        return _found(self._model, name) if own.is_meta else own

    def __iter__(self) -> Iterator[str]:
        return iter(self.placed)

    def __len__(self) -> int:
        return len(self.placed)

    def __contains__(self, name: object) -> bool:
        return name in self.placed


class Chosen(Mapping[str, Tensor]):
    """Some of many tensors, each looked up when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._tensors, self._names = tensors, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def with_offloaded(model: nn.Module, state: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """A model's tensors by name, in place of those on the meta device what is kept for them."""
    return Offloaded(model, state) if any(tensor.is_meta for tensor in state.values()) else state


def execution_device(model: nn.Module) -> torch.device | None:
    """Where an offloaded model computes first."""
    for module in model.modules():
        for hook in _hooks(module):
            if hook.execution_device is not None:
                device = hook.execution_device
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return None


def check_writable(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse tensors that are read from disk at every call: nothing that is written to them would stay."""
    state = dict(model.named_parameters(remove_duplicate=False))
    offloaded = [name for name in names if name in state and state[name].is_meta]
    on_disk = [name for name in offloaded if _in_memory(partial(_found, model, name)) is None]
    if on_disk:
        raise EditError(
            f"{listing(on_disk)} are offloaded to disk, from where they are read anew at every call. Write the edited "
            "checkpoint with unmerge.edit_checkpoint(dir_in, edit, alpha, dir_out), or load the model without a disk "
            "offload."
        )


def _in_memory(read: Callable[[], Tensor | None]) -> Tensor | None:
    """What is read, where it is the same tensor each time; from disk it is another."""
    first, second = read(), read()
    return first if first is not None and second is not None and first.data_ptr() == second.data_ptr() else None


def _found(model: nn.Module, name: str) -> Tensor:
    owner, _, part = name.rpartition(".")
    parts = owner.split(".") if owner else []
    # The hook may stand on a module further out, which places all that is inside.
    for count in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:count]))
        value = _stored(module, ".".join([*parts[count:], part]))
        if value is not None:
            return value
    raise LayerError(f"{name} is on the meta device: the model was never loaded.")


def _stored(module: nn.Module, name: str) -> Tensor | None:
    for hook in _hooks(module):
        if hook.weights_map is not None:
            try:
                value = hook.weights_map[name]
            except KeyError:
                continue
            return value if isinstance(value, Tensor) else None
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on a module that place tensors."""
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if hasattr(part, "weights_map"):
            yield part
