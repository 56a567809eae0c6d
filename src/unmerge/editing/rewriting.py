"""The new value of a tensor that an edit changes, one tensor at a time: computed wide, rounded once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmerge.model.experts import tensor_and_place
from unmerge.model.layers import from_matrix, tensor_name

if TYPE_CHECKING:
    from unmerge.editing.edit import Edit
    from unmerge.editing.layer_edit import LayerEdit

REMOVED_BIAS = -1e4  # finite in float16, and below any logit
_ENTRIES = 1 << 22  # of a weight that are looked at in one go


def rewritten(edit: Edit, name: str, state: Mapping[str, Tensor], alpha: float, head_alpha: float) -> Tensor:
    """The tensor `name` of a state dict with the edit in it; of the other tensors only the head's bias is read."""
    value = state[name].detach()
    for layer_name, layer in edit.layers.items():
        strength = head_alpha if layer_name == edit.head else alpha
        if name == tensor_name(layer_name, "weight"):
            expert = tensor_and_place(layer_name)
            if expert is None:
                value = _less_product(value, layer, strength)
            else:
                value = value.clone() if value.data_ptr() == state[name].data_ptr() else value
                value[expert[1]] = _less_product(value[expert[1]], layer, strength)
        if name == layer.shift_to and layer.shift is not None:
            # A BatchNorm subtracts its running mean.
            sign = -1 if name.endswith(".running_mean") else 1
            wide = torch.promote_types(value.dtype, layer.shift.dtype)
            shift = layer.shift.to(value.device, wide)
            value = value.to(wide).add(shift, alpha=sign * strength).to(value.dtype)
    return _without_removed_rows(value, edit, name, state)


def surviving_share(layer: LayerEdit, weight: Tensor, alpha: float) -> float:
    """The share of a layer's change that rounding to the weight's type leaves."""
    matrix = weight.detach().mT if layer.transposed else weight.detach().reshape(*layer.B.shape[:-1], -1)
    # Wide enough to see the rounding, and some rows at a time to stay small.
    wide = torch.float32 if torch.finfo(weight.dtype).bits < 32 else torch.float64
    basis = layer.Q.to(weight.device, wide)
    kept, whole = 0.0, 0.0
    rows = max(1, _ENTRIES // matrix.shape[-1])
    for exact, coefficients in zip(matrix.split(rows, -2), layer.B.split(rows, -2), strict=True):
        before, meant = exact.to(wide), -alpha * coefficients.to(basis) @ basis.mT
        rounded = (before + meant).to(weight.dtype).to(wide) - before
        kept += (rounded * meant).sum().item()
        whole += meant.square().sum().item()
    return kept / whole if whole else 1.0


def _less_product(weight: Tensor, layer: LayerEdit, strength: float) -> Tensor:
    """W − α B Qᵀ."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    B, Q = layer.B.to(weight.device, wide), layer.Q.to(weight.device, wide)
    delta = from_matrix(B @ Q.mT, weight, layer.transposed)
    return weight.to(wide).sub(delta, alpha=strength).to(weight.dtype)


def _without_removed_rows(value: Tensor, edit: Edit, name: str, state: Mapping[str, Tensor]) -> Tensor:
    """The head's weight or bias with its removed rows out; any other tensor as it is."""
    if edit.head is None or name not in (tensor_name(edit.head, "weight"), tensor_name(edit.head, "bias")):
        return value
    rows = _removed_rows(edit.head, edit.removed, state)
    if not rows:
        return value
    value = value.clone()
    if value.dim() == 1:
        value[rows] = REMOVED_BIAS
    elif edit.layers[edit.head].transposed:
        value[:, rows] = 0
    else:
        value[rows] = 0
    return value


def _removed_rows(head: str, removed: tuple[int, ...], state: Mapping[str, Tensor]) -> list[int]:
    """The rows to take out, with those that an earlier edit took out, which must stay so."""
    bias = state.get(tensor_name(head, "bias"))
    if bias is None:
        return list(removed)
    gone = (bias.detach() == torch.tensor(REMOVED_BIAS, dtype=bias.dtype, device=bias.device)).nonzero()
    return sorted({*removed, *gone.flatten().tolist()})
