"""An edit as a PEFT LoRA adapter on disk, and such a directory as an edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unmerge.distributed.processes import is_first
from unmerge.editing.binding import check_model
from unmerge.editing.edit import Edit
from unmerge.editing.layer_edit import LayerEdit
from unmerge.errors import EditError, FileError, LayerError, listing
from unmerge.interop.lora import PREFIX, edit_of_lora
from unmerge.model.layers import carries_adapters, tensor_name
from unmerge.placement.state import state_of
from unmerge.storage.files import load_weights, opened, put_json, put_tensors, read_json, read_tensors, replacing
from unmerge.storage.fingerprint import kind_of
from unmerge.storage.forms import check_fields

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
KIND = "adapter"


def write_adapter(edit: Edit, directory: Path, alpha: float, base: nn.Module | str | Path | None = None) -> None:
    """Write `lora_A = Qᵀ`, `lora_B = −αB` and PEFT's configuration, with all that the edit says of itself."""
    if alpha == 0:
        raise EditError("alpha=0 makes an adapter that changes nothing. Pass the strength to export.")
    model = base if isinstance(base, nn.Module) else None
    if model is not None:
        _check_plain(model)
        check_model(edit, model)
    _check_expressible(edit, model)
    has_bias = any(layer.shift is not None for layer in edit.layers.values())
    tensors: dict[str, Tensor] = {}
    for name, layer in edit.layers.items():
        parts = _lora_parts(layer, _weight_shape(edit, name, model), alpha, has_bias)
        tensors |= {f"{PREFIX}{name}.{part}": value for part, value in parts.items()}
    if not is_first():
        return
    readable = directory / CONFIG
    with replacing(readable) as config_part, replacing(directory / TENSORS) as part:
        put_json(config_part, _config(edit, has_bias, base))
        put_tensors(part, tensors, KIND, {**edit.to_dict(), "exported_alpha": alpha})
        readable.unlink(missing_ok=True)  # never the tensors of one adapter under the configuration of another


def read_adapter(directory: Path, base: nn.Module | None = None) -> Edit:
    """The edit that `write_adapter` wrote, or that a plain LoRA adapter of others is at alpha 1."""
    path = directory / TENSORS
    if not path.is_file():
        pickled = directory / "adapter_model.bin"
        hint = f" {pickled.name} is a pickle: load it with PEFT and save it again." if pickled.is_file() else ""
        raise FileError(f"{directory} holds no adapter: there is no {TENSORS} in it.{hint}")
    if base is not None:
        _check_plain(base)
    with opened(path) as (_, metadata):
        is_ours = metadata.get("unmerge") == KIND
    if not is_ours:
        return edit_of_lora(_read_config(directory / CONFIG), load_weights(path), base, directory)
    edit = _own_edit(path)
    if base is not None:
        check_model(edit, base)
    return edit


def _check_plain(model: nn.Module) -> None:
    if carries_adapters(model):
        raise LayerError("base carries PEFT adapters itself. Pass the plain model, as before PeftModel wrapped it.")


def _check_expressible(edit: Edit, model: nn.Module | None) -> None:
    """Refuse an edit of which an adapter would drop a part, and say which."""
    layers = edit.layers
    beyond = {name: "it is the whole model" if not name else layer.beyond_lora for name, layer in layers.items()}
    in_norms = [name for name, layer in layers.items() if layer.shift_to not in (None, tensor_name(name, "bias"))]
    dropped = [f"the change of {name!r} ({reason})" for name, reason in beyond.items() if reason]
    if edit.removed:
        dropped.append(f"the removal of the rows {list(edit.removed)} of {edit.head!r}")
    if in_norms:
        dropped.append(f"the constants of {listing(in_norms)}, which a BatchNorm takes")
    with_constant = [name for name, layer in layers.items() if layer.shift is not None and name not in in_norms]
    unbiased = [name for name, layer in layers.items() if layer.shift is None and not _has_bias(name, model)]
    if with_constant and unbiased:
        # PEFT gives every layer of an adapter a lora_bias or none, and merges it only into a bias.
        dropped.append(f"the constants of {listing(with_constant)}, since {listing(unbiased)} have no bias for one")
    if dropped:
        raise EditError(
            f"a LoRA adapter cannot hold {'; '.join(dropped)}. Write the whole model instead, with "
            "unmerge.edit_checkpoint(dir_in, edit, alpha, dir_out) or with edit.apply(model) and "
            "model.save_pretrained(...); or fit an edit that an adapter can hold: "
            "Recipe(mean='orthogonal', bias='keep', head='edit') on linear layers and plain convolutions."
        )


def _has_bias(name: str, model: nn.Module | None) -> bool:
    return model is not None and tensor_name(name, "bias") in state_of(model)


def _weight_shape(edit: Edit, name: str, model: nn.Module | None) -> tuple[int, ...]:
    """The shape of a layer's weight; two-dimensional where neither the edit nor a model says it."""
    weight = tensor_name(name, "weight")
    if model is not None:
        return tuple(state_of(model)[weight].shape)
    if weight in edit.weights:
        return kind_of(edit.weights[weight])[1]
    return edit.layers[name].B.shape[0], edit.layers[name].Q.shape[0]


def _lora_parts(layer: LayerEdit, shape: tuple[int, ...], alpha: float, has_bias: bool) -> dict[str, Tensor]:
    """The tensors of one layer as PEFT names and shapes them."""
    kernel = shape[2:]
    down, up = layer.Q.mT, -alpha * layer.B
    if kernel:
        down, up = down.reshape(layer.rank, -1, *kernel), up.reshape(-1, layer.rank, *(1 for _ in kernel))
    parts = {"lora_A.weight": down, "lora_B.weight": up}
    if has_bias:
        out = layer.B.shape[0]
        parts["lora_B.bias"] = layer.B.new_zeros(out) if layer.shift is None else alpha * layer.shift
    return parts


def _config(edit: Edit, has_bias: bool, base: nn.Module | str | Path | None) -> dict[str, Any]:
    """PEFT's configuration: every layer at scaling lora_alpha / r = 1."""
    ranks = {name: layer.rank for name, layer in edit.layers.items()}
    rank = max(ranks.values())
    # PEFT reads the keys as patterns for the end of a name.
    others = {f"^{re.escape(name)}": own for name, own in ranks.items() if own != rank}
    is_model = isinstance(base, nn.Module)
    name = getattr(base, "name_or_path", None) if is_model else base
    return {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": (
            {"base_model_class": type(base).__name__, "parent_library": type(base).__module__} if is_model else None
        ),
        "base_model_name_or_path": name and str(name),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": _targets(list(ranks), base if isinstance(base, nn.Module) else None),
        "fan_in_fan_out": any(layer.transposed for layer in edit.layers.values()),
        "lora_bias": has_bias,
        "bias": "none",
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _targets(names: list[str], model: nn.Module | None) -> list[str] | str:
    """The names where PEFT, which compares the ends of names, finds no other module by them; else a pattern."""
    ends = tuple(f".{name}" for name in names)
    if model is not None and not any(name.endswith(ends) for name, _ in model.named_modules() if name not in names):
        return names
    return "|".join(re.escape(name) for name in names)


def _own_edit(path: Path) -> Edit:
    tensors, header = read_tensors(path, KIND)
    parts: dict[str, Tensor] = {}
    try:
        check_fields(header, {"exported_alpha": float, "layers": dict[str, dict[str, Any]]})
        alpha = header["exported_alpha"]
        if not alpha:
            raise ValueError("its strength is 0")
        for name, entry in header["layers"].items():
            own = f"{PREFIX}{name}"
            parts[f"{name}:Q"] = tensors[f"{own}.lora_A.weight"].flatten(1).mT.contiguous()
            parts[f"{name}:B"] = tensors[f"{own}.lora_B.weight"].flatten(1) / -alpha
            if entry["shift_to"] is not None:
                parts[f"{name}:shift"] = tensors[f"{own}.lora_B.bias"] / alpha
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileError(f"{path} was written by another version of unmerge: {error!r}.") from error
    return Edit.from_dict(header, parts, path)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileError(f"there is no {path.name} beside the tensors in {path.parent}.")
    config = read_json(path, "configuration of an adapter")
    if not isinstance(config, dict):
        raise FileError(f"{path} is no configuration of an adapter: it holds a {type(config).__name__}.")
    return config
