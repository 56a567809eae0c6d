"""A plain LoRA adapter that others trained, as an edit."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.editing.binding import check_shapes
from unmerge.editing.edit import Edit
from unmerge.editing.layer_edit import LayerEdit
from unmerge.errors import EditError, FileError, listing
from unmerge.model.layers import beyond_lora, is_transposed, tensor_name
from unmerge.placement.state import state_of
from unmerge.recipe import Recipe
from unmerge.storage.fingerprint import fingerprint
from unmerge.storage.forms import check_fields
from unmerge.version import VERSION

PREFIX = "base_model.model."
_KEY = re.compile(re.escape(PREFIX) + r"(?P<layer>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias)")
# Settings under which W + s·BA is not all that the adapter does.
_VARIANTS = (
    *("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    *("monteclora_config", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
)
_SETTINGS = {
    "lora_alpha": float,
    "alpha_pattern": dict[str, float] | None,
    "base_model_name_or_path": str | None,
}
_REPEATS, _LONGEST = 3, 1000  # of a pattern; the length also of a layer's name
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # after which the base weights are as they were


def edit_of_lora(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module | None, source: Path
) -> Edit:
    """The edit that at alpha 1 does what merging the adapter does; bound to the weights of `base` where it is given."""
    _check_config(config, source)
    strange = [key for key in tensors if len(key) > _LONGEST or not _KEY.fullmatch(key)]
    if strange:
        raise FileError(
            f"{source} is no plain LoRA adapter of linear layers and convolutions: it has {listing(strange)}."
        )
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        assert found is not None
        parts[found["layer"]][found["part"]] = tensor
    halves = [name for name, own in parts.items() if not {"lora_A.weight", "lora_B.weight"} <= own.keys()]
    if halves or not parts:
        raise FileError(f"{source} lacks lora_A or lora_B of {listing(halves) or 'every layer'}.")
    modules = _modules_of(base, list(parts), config)
    layers = {name: _layer(name, own, config, modules.get(name)) for name, own in parts.items()}
    edit = Edit(
        layers,
        Recipe(layers=list(layers), alpha=1.0, mean="preserve" if config.get("lora_bias") else "free", head="edit"),
        alpha=1.0,
        provenance={"unmerge": VERSION, "adapter": {"base": config.get("base_model_name_or_path"), "settings": config}},
    )
    if base is None:
        return edit
    state = state_of(base)
    check_shapes(edit, state)
    edit.weights.update(fingerprint({name: state[name] for name in edit.touched}))
    return edit


def _scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """What PEFT multiplies B A of a layer by."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name):
            alpha = value
            break
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _check_config(config: Mapping[str, Any], source: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise FileError(f"{source} is an adapter of type {kind!r}; only LoRA is a low-rank change of weights.")
    found = [f"{name}={config[name]!r}" for name in _VARIANTS if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"bias={config['bias']!r}")
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        found.append(f"init_lora_weights={config['init_lora_weights']!r}, which changes the base weights")
    if found:
        raise FileError(
            f"{source} is no plain LoRA adapter: {', '.join(found)}. Merge it with PEFT (merge_and_unload) and pass "
            "the base as init= instead."
        )
    settings = {"lora_alpha": 8, "alpha_pattern": None, "base_model_name_or_path": None} | dict(config)
    try:
        check_fields(settings, _SETTINGS, "its configuration")
    except TypeError as error:
        raise FileError(f"{source} is no plain LoRA adapter: {error}.") from error
    unclear = [pattern for pattern in settings["alpha_pattern"] or {} if not _is_plain_pattern(pattern)]
    if unclear:
        raise FileError(
            f"{source} names layers by {listing(map(repr, unclear))} in alpha_pattern, which is no pattern or could "
            f"take forever to compare. Write it with at most {_REPEATS} of * + ? {{ and none behind a bracket."
        )


def _is_plain_pattern(pattern: str) -> bool:
    """Whether a pattern from a file is one, and of a form that a long name cannot make run forever."""
    bare = re.sub(r"\\.", "x", pattern)
    if len(pattern) > _LONGEST or re.search(r"\)[*+?{]", bare) or len(re.findall(r"[*+?{]", bare)) > _REPEATS:
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _modules_of(base: nn.Module | None, names: list[str], config: Mapping[str, Any]) -> dict[str, nn.Module]:
    if base is None:
        return {}
    modules = dict(base.named_modules())
    missing = [name for name in names if name not in modules]
    if missing:
        meant = config.get("base_model_name_or_path") or "another model"
        raise EditError(f"base has no {listing(missing)}, which the adapter changes: it was made for {meant}.")
    unlike = [f"{name} ({reason})" for name in names if (reason := beyond_lora(modules[name]))]
    if unlike:
        raise EditError(f"PEFT's adapters of {listing(unlike)} are no low-rank change of the weight.")
    return {name: modules[name] for name in names}


def _layer(name: str, parts: Mapping[str, Tensor], config: Mapping[str, Any], module: nn.Module | None) -> LayerEdit:
    """−s·B A as B' Qᵀ with orthonormal Q, by a QR of Aᵀ."""
    down, up, constant = (parts.get(part) for part in ("lora_A.weight", "lora_B.weight", "lora_B.bias"))
    assert down is not None
    assert up is not None
    given = [part for part in (down, up, constant) if part is not None]
    if min(down.dim(), up.dim()) < 2 or not all(part.is_floating_point() and part.numel() for part in given):
        shapes = " and ".join(f"{part.dtype}{list(part.shape)}" for part in given)
        raise FileError(f"lora_A and lora_B of {name!r} are no matrices of numbers: {shapes}.")
    if up.flatten(1).shape[1] != down.shape[0] or (constant is not None and constant.shape != up.shape[:1]):
        raise FileError(f"lora_A and lora_B of {name!r} have other ranks: {tuple(down.shape)} and {tuple(up.shape)}.")
    if not all(part.isfinite().all() for part in given):
        raise FileError(f"the adapter holds NaN or infinite values for {name!r}.")
    scale = _scaling(config, name, down.shape[0])
    is_turned = down.dim() == 2 and bool(config.get("fan_in_fan_out"))
    wide = torch.promote_types(down.dtype, torch.float32)
    basis, upper = torch.linalg.qr(down.flatten(1).double().mT)
    return LayerEdit(
        B=(-scale * up.flatten(1).double() @ upper.mT).to(wide),
        Q=basis.to(wide),
        shift=None if constant is None else (scale * constant.double()).to(wide),
        shift_to=None if constant is None else tensor_name(name, "bias"),
        transposed=is_turned if module is None else is_transposed(module),
    )
