"""Whether tensors are those that an edit was fitted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from unmerge.errors import EditError, listing
from unmerge.model.layers import tensor_name, weight_in
from unmerge.model.ledger import ledger_of
from unmerge.placement.offloading import check_writable
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import differences, fingerprint

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
