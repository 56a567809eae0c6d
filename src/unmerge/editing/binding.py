"""Whether tensors are those that an edit was fitted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from unmerge.errors import EditError, listing
from unmerge.model.layers import tensor_name, weight_in
from unmerge.model.ledger import ledger_of
from unmerge.placement.offloading import check_writable
from unmerge.storage.fingerprint import differences, fingerprint, kind_of, state_of

if TYPE_CHECKING:
    from unmerge.editing.edit import Edit


def check_model(edit: Edit, model: nn.Module, force: bool = False) -> None:
    """Refuse a model of another shape, and without `force` one of other weights."""
    state = state_of(model)
    check_shapes(edit, state)
    check_writable(model, edit.touched)
    if force:
        return
    # Fitted on the weights as they are, or on those from before the edits that the model carries.
    mine = {name: state[name] for name in edit.touched}
    changed = differences(fingerprint(mine), edit.weights)
    if changed:
        before = ledger_of(model).before
        original = {name: before.get(name, tensor) for name, tensor in mine.items()}
        if differences(fingerprint(original), edit.weights):
            raise other_weights(edit, changed)


def check_shapes(edit: Edit, state: Mapping[str, Tensor]) -> None:
    """Refuse a state dict that lacks a tensor of the edit, or holds a weight of another shape."""
    missing = [name for name in edit.touched if name not in state]
    if missing:
        raise EditError(f"the model has no {listing(missing)}, which this edit changes; it belongs to another.")
    shapes = [
        tensor_name(name, "weight") for name, layer in edit.layers.items() if not layer.fits(weight_in(state, name))
    ]
    if shapes:
        raise EditError(f"{listing(shapes)} have other shapes in this model than in the one that was fitted.")
    if edit.removed and edit.head is not None:
        rows = len(state[tensor_name(edit.head, "bias")])
        if max(edit.removed) >= rows:
            raise EditError(f"this edit removes the rows {list(edit.removed)} of {edit.head!r}, which has {rows}.")


def check_whole(edit: Edit) -> None:
    """Refuse an edit whose parts do not fit one another, as no fit makes it but a file may hold it."""
    for name, layer in edit.layers.items():
        coefficients, basis = layer.B, layer.Q
        fits = (
            coefficients.dim() == basis.dim()
            and coefficients.dim() in (2, 3)
            and coefficients.shape[-1] == basis.shape[-1]
            and coefficients.shape[:-2] == basis.shape[:-2]
            and (layer.shift is None or layer.shift.shape == (coefficients.shape[:-1].numel(),))
        )
        parts = (coefficients, basis, *([] if layer.shift is None else [layer.shift]))
        if not fits or not all(part.is_floating_point() for part in parts):
            shapes = " and ".join(f"{part.dtype}{list(part.shape)}" for part in parts)
            raise EditError(f"the parts of layer {name!r} do not fit one another: {shapes}")
        if (layer.shift is None) != (layer.shift_to is None):
            raise EditError(f"layer {name!r} has a constant without a place for it, or the reverse")
    if edit.alpha is not None and edit.alpha < 0:
        raise EditError(f"its alpha is {edit.alpha}")
    if edit.removed and (edit.head is None or min(edit.removed) < 0):
        raise EditError(f"it removes the rows {list(edit.removed)} of {edit.head!r}")
    for checksum in edit.weights.values():
        kind_of(checksum)


def other_weights(edit: Edit, changed: Iterable[str]) -> EditError:
    """The error that names the layers whose weights are not those that the edit was fitted on."""
    if not edit.weights:
        return EditError(
            "this edit does not say which weights it belongs to. Pass force=True if it belongs to these, or bind it "
            "when it is read: Edit.from_peft(directory, base=model)."
        )
    layers = dict.fromkeys(name.rpartition(".")[0] for name in changed)
    return EditError(
        f"this edit was fitted on other weights of {listing(layers)}. Apply it to the checkpoint it was fitted on, or "
        "pass force=True."
    )
