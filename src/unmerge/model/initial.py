"""The weights before fine-tuning: zero, a state dict, a module or a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.errors import FileError, InitError, listing
from unmerge.model import pretrained
from unmerge.model.layers import tensor_name, weight_in
from unmerge.placement.offloading import Chosen
from unmerge.placement.sharded import Whole
from unmerge.placement.state import state_of
from unmerge.storage.files import load_weights, read_weight_map

Init = str | Path | Mapping[str, Tensor] | nn.Module

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")
_ELSE = 'leave those layers out with layers=... (the classifier with head="keep"), or use init="zero".'


class TaskVectors(Mapping[str, Tensor]):
    """τ = W − W_init by parameter name, each computed when it is asked for: together they would be a second model."""

    def __init__(self, current: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None) -> None:
        self._current, self._initial = current, initial

    def __getitem__(self, name: str) -> Tensor:
        return _difference(self._current[name], None if self._initial is None else self._initial[name])

    def of(self, layer: str) -> Tensor:
        """The task vector of a layer's weight; of an expert's slice its part alone."""
        initial = None if self._initial is None else weight_in(self._initial, layer)
        return _difference(weight_in(self._current, layer), initial)

    def has_moved(self, name: str) -> bool:
        """Whether fine-tuning changed a tensor."""
        return any(bool((weight - initial).any()) for weight, initial in self._pairs(name))

    def pairs(self, layers: Iterable[str] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight, or some layers', with its initial value; experts one after the other: all take too much."""
        for name in self if layers is None else dict.fromkeys(tensor_name(layer, "weight") for layer in layers):
            yield from self._pairs(name)

    def _pairs(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        current = self._current[name]
        initial = torch.zeros_like(current) if self._initial is None else self._initial[name]
        for mine, theirs in zip(_matrices(current), _matrices(initial), strict=True):
            weight = _wide(mine)
            yield weight, theirs.to(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)


def _matrices(weight: Tensor) -> Sequence[Tensor]:
    """The weights of several experts one by one; any other as it is."""
    return weight.unbind() if weight.dim() == 3 else (weight,)


def _wide(weight: Tensor) -> Tensor:
    """In half precision a small difference of large weights would be rounding."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def _difference(current: Tensor, initial: Tensor | None) -> Tensor:
    weight = _wide(current)
    return weight if initial is None else weight - initial.to(weight)


def initial_weights(model: nn.Module, init: Init, names: Iterable[str]) -> dict[str, Tensor]:
    """The initial value of each named parameter, on its device; zeros for "zero"."""
    wanted = Whole(Chosen(state_of(model), names))
    given = _checked(model, init, wanted)
    if given is None:
        return {name: torch.zeros_like(parameter) for name, parameter in wanted.items()}
    return {name: given[name].to(parameter.device) for name, parameter in wanted.items()}


def check(model: nn.Module, init: Init, names: Iterable[str]) -> None:
    """Refuse initial weights that `initial_weights` would refuse, without placing them on the model's device."""
    _checked(model, init, Whole(Chosen(state_of(model), names)))


def lacking(model: nn.Module, init: Init, layers: Sequence[str]) -> list[str]:
    """The layers whose weights the initial ones do not have, or have in another shape."""
    if not layers or (isinstance(init, str) and init == "zero"):
        return []
    wanted = Chosen(state_of(model), [tensor_name(layer, "weight") for layer in layers])
    given = _state(model, init, wanted)
    strange = {name for name in wanted if name not in given or given[name].shape != wanted[name].shape}
    return [layer for layer in layers if tensor_name(layer, "weight") in strange]


def task_vectors(model: nn.Module, init: Init, layers: Iterable[str], with_biases: bool = False) -> TaskVectors:
    """τ = W − W_init of the layers' weights, and of their biases where these are asked for."""
    own = state_of(model)
    layers = list(layers)
    wanted = [tensor_name(name, "weight") for name in layers]
    if with_biases:
        wanted += [bias for name in layers if (bias := tensor_name(name, "bias")) in own]
    current = Whole(Chosen(own, wanted))
    return TaskVectors(current, _checked(model, init, current))


def _checked(model: nn.Module, init: Init, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """The initial weights, which fit those that are wanted; None for "zero"."""
    if isinstance(init, str) and init == "zero":
        return None
    given = _state(model, init, wanted)
    missing = [name for name in wanted if name not in given]
    if missing:
        raise InitError(
            f"init lacks {len(missing)} of the {len(wanted)} edited parameters: {', '.join(missing)}. "
            f"It has {listing(given)}. Pass the checkpoint that fine-tuning started from, {_ELSE}"
        )
    strange = [name for name in wanted if not isinstance(given[name], Tensor)]
    if strange:
        raise InitError(f"init holds no tensor but a {type(given[strange[0]]).__name__} under {listing(strange)}.")
    _check_shapes(given, wanted)
    broken = [name for name, weight in wanted.items() if not _is_finite(given[name], weight.device)]
    if broken:
        raise InitError(f"init holds NaN or infinite values in {listing(broken)}.")
    weights = [name for name, parameter in wanted.items() if parameter.dim() > 1]
    if weights and all(_are_equal(given[name], wanted[name]) for name in weights):
        raise InitError(
            "init has the same weights as the model in every edited layer, so the task vector is zero. "
            'Pass the checkpoint from before fine-tuning, or init="zero"; where fine-tuning changed only some layers, '
            "as an adapter does, select those with Recipe(layers=...)."
        )
    return given


def _is_finite(given: Tensor, device: torch.device) -> bool:
    return all(bool(part.to(device).isfinite().all()) for part in _matrices(given))


def _are_equal(given: Tensor, weight: Tensor) -> bool:
    parts = zip(_matrices(given), _matrices(weight), strict=True)
    return all(torch.equal(theirs.to(mine), mine) for theirs, mine in parts)


def _check_shapes(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    other = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in wanted}
    other = {name: shapes for name, shapes in other.items() if shapes[0] != shapes[1]}
    if not other:
        return
    shown = "; ".join(f"{name} is {theirs} in init and {mine} in the model" for name, (theirs, mine) in other.items())
    hint = ""
    if all(theirs[1:] == mine[1:] for theirs, mine in other.values()):
        hint = (
            " Only the number of rows differs: a vocabulary that grew (init.resize_token_embeddings(...) gives a "
            "language model the same), or other classes."
        )
    raise InitError(f"init has other shapes: {shown}.{hint} Pass the checkpoint that fine-tuning started from, {_ELSE}")


def _state(model: nn.Module, init: Any, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(init, nn.Module):
        return Whole(state_of(init))
    if isinstance(init, Mapping):
        return init
    if isinstance(init, (str, Path)):
        found = _read(Path(init), wanted)
        if any(name not in found for name in wanted) and pretrained.is_alike(model, Path(init)):
            return pretrained.as_loaded(model, Path(init))
        return found
    raise InitError(
        f"init is a {type(init).__name__}; expected 'zero', a state dict, a module, or the path of a checkpoint."
    )


def _read(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if path.is_file():
        return load_weights(path)
    if not path.is_dir():
        raise FileError(
            f"init={str(path)!r} is neither 'zero' nor a file or directory that exists; nothing is downloaded."
        )
    for name in _INDEXES:
        if (path / name).is_file():
            return _read_shards(path, path / name, wanted)
    for name in _FILES:
        if (path / name).is_file():
            return load_weights(path / name)
    raise FileError(f"{path} holds no checkpoint; expected one of {', '.join((*_FILES, *_INDEXES))}.")


def _read_shards(directory: Path, index: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Only those shards of a checkpoint that hold a wanted parameter."""
    places = read_weight_map(index)
    state: dict[str, Tensor] = {}
    for file in dict.fromkeys(file for name, file in places.items() if name in wanted):
        state.update(load_weights(directory / file))
    return state
