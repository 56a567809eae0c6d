"""The weights before fine-tuning: zero, a state dict, a module or a checkpoint on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.errors import FileError, InitError, listing
from unmerge.files import load_weights
from unmerge.layers import tensor_name

Init = str | Path | Mapping[str, Tensor] | nn.Module

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")


def initial_weights(model: nn.Module, init: Init, names: Iterable[str]) -> dict[str, Tensor]:
    """The initial value of each named parameter, on its device; zeros for "zero"."""
    own = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name: own[name] for name in names}
    if isinstance(init, str) and init == "zero":
        return {name: torch.zeros_like(parameter) for name, parameter in wanted.items()}
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
    shapes = [
        f"{name} is {tuple(given[name].shape)} in init and {tuple(parameter.shape)} in the model"
        for name, parameter in wanted.items()
        if given[name].shape != parameter.shape
    ]
    if shapes:
        raise InitError(
            "init has other shapes: "
            + "; ".join(shapes)
            + '. Leave those layers out with layers=..., or use init="zero".'
        )
    values = {name: given[name].to(parameter.device) for name, parameter in wanted.items()}
    broken = [name for name, value in values.items() if not value.isfinite().all()]
    if broken:
        raise InitError(f"init holds NaN or infinite values in {listing(broken)}.")
    weights = [name for name, parameter in wanted.items() if parameter.dim() > 1]
    if weights and all(torch.equal(values[name].to(wanted[name].dtype), wanted[name]) for name in weights):
        raise InitError(
            "init has the same weights as the model in every edited layer, so the task vector is zero. "
            'Pass the checkpoint from before fine-tuning, or init="zero".'
        )
    return values


def task_vectors(model: nn.Module, init: Init, layers: Iterable[str], with_biases: bool = False) -> dict[str, Tensor]:
    """τ = W − W_init of the layers' weights, and of their biases where these are asked for."""
    own = dict(model.named_parameters(remove_duplicate=False))
    layers = list(layers)
    wanted = [tensor_name(name, "weight") for name in layers]
    if with_biases:
        wanted += [bias for name in layers if (bias := tensor_name(name, "bias")) in own]
    initial = initial_weights(model, init, wanted)
    # Wide, since in half precision a small difference of large weights would be rounding.
    wide = {name: torch.promote_types(own[name].dtype, torch.float32) for name in wanted}
    return {name: own[name].detach().to(wide[name]) - initial[name].to(wide[name]) for name in wanted}


def _state(init: Any, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(init, nn.Module):
        return init.state_dict()
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
    try:
        places = json.loads(index.read_text())["weight_map"]
        files = {place: Path(place).name for name, place in places.items() if name in wanted}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FileError(f"{index} is no checkpoint index: {error!r}.") from error
    state: dict[str, Tensor] = {}
    for place, name in files.items():
        if place != name:
            raise FileError(f"{index} names a file outside its directory: {place!r}.")
        state.update(load_weights(directory / name))
    return state
