"""The weights before fine-tuning: zero, a state dict, a module or a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.errors import FileError, InitError, listing
from unmerge.files import load_weights, read_weight_map
from unmerge.fingerprint import state_of
from unmerge.layers import tensor_name, weight_in
from unmerge.sharded import Whole

Init = str | Path | Mapping[str, Tensor] | nn.Module

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")


class TaskVectors(Mapping[str, Tensor]):
    """τ = W − W_init by parameter name, each computed when it is asked for: together they would be a second model."""

    def __init__(self, current: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None) -> None:
        self._current, self._initial = current, initial

    def __getitem__(self, name: str) -> Tensor:
        return _difference(self._current[name], None if self._initial is None else self._initial[name])

    def of(self, layer: str) -> Tensor:
        """That of a layer's weight; of an expert's slice its part alone."""
        initial = None if self._initial is None else weight_in(self._initial, layer)
        return _difference(weight_in(self._current, layer), initial)

    def __iter__(self) -> Iterator[str]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)


def _difference(current: Tensor, initial: Tensor | None) -> Tensor:
    # Wide, since in half precision a small difference of large weights would be rounding.
    wide = torch.promote_types(current.dtype, torch.float32)
    weight = current.detach().to(wide)
    return weight if initial is None else weight - initial.to(weight.device, wide)


def initial_weights(model: nn.Module, init: Init, names: Iterable[str]) -> dict[str, Tensor]:
    """The initial value of each named parameter, on its device; zeros for "zero"."""
    own = state_of(model)
    wanted = Whole({name: own[name] for name in names})
    given = _checked(init, wanted)
    if given is None:
        return {name: torch.zeros_like(parameter) for name, parameter in wanted.items()}
    return {name: given[name].to(parameter.device) for name, parameter in wanted.items()}


def task_vectors(model: nn.Module, init: Init, layers: Iterable[str], with_biases: bool = False) -> TaskVectors:
    """τ = W − W_init of the layers' weights, and of their biases where these are asked for."""
    own = state_of(model)
    layers = list(layers)
    wanted = [tensor_name(name, "weight") for name in layers]
    if with_biases:
        wanted += [bias for name in layers if (bias := tensor_name(name, "bias")) in own]
    current = Whole({name: own[name] for name in wanted})
    return TaskVectors(current, _checked(init, current))


def _checked(init: Init, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """The initial weights, which fit those that are wanted; None for "zero"."""
    if isinstance(init, str) and init == "zero":
        return None
    given = _state(init, wanted)
    missing = [name for name in wanted if name not in given]
    if missing:
        raise InitError(
            f"init lacks {len(missing)} of the {len(wanted)} edited parameters: {', '.join(missing)}. "
            f'It has {listing(given)}. Pass the checkpoint that fine-tuning started from, or init="zero".'
        )
    strange = [name for name in wanted if not isinstance(given[name], Tensor)]
    if strange:
        raise InitError(f"init holds no tensor but a {type(given[strange[0]]).__name__} under {listing(strange)}.")
    _check_shapes(given, wanted)
    broken = [name for name, weight in wanted.items() if not given[name].to(weight.device).isfinite().all()]
    if broken:
        raise InitError(f"init holds NaN or infinite values in {listing(broken)}.")
    weights = [name for name, parameter in wanted.items() if parameter.dim() > 1]
    if weights and all(torch.equal(given[name].to(wanted[name]), wanted[name]) for name in weights):
        raise InitError(
            "init has the same weights as the model in every edited layer, so the task vector is zero. "
            'Pass the checkpoint from before fine-tuning, or init="zero"; where fine-tuning changed only some layers, '
            "as an adapter does, select those with Recipe(layers=...)."
        )
    return given


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
    raise InitError(
        f'init has other shapes: {shown}.{hint} Leave those layers out with layers=..., or use init="zero".'
    )


def _state(init: Any, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(init, nn.Module):
        return Whole(init.state_dict())
    if isinstance(init, Mapping):
        return init
    if isinstance(init, (str, Path)):
        return _read(Path(init), wanted)
    raise InitError(
        f"init is a {type(init).__name__}; expected 'zero', a state dict, a module, or the path of a checkpoint."
    )


def _read(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if path.is_file():
        return load_weights(path)
    if not path.is_dir():
        raise FileError(f"init={str(path)!r} is neither 'zero' nor a file or directory that exists.")
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
