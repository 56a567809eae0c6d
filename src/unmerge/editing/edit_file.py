"""What the file of an edit says of it, and whether what was read from one has that form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unmerge.errors import EditError
from unmerge.recipe import BASES, Recipe
from unmerge.storage.fingerprint import kind_of
from unmerge.storage.forms import check_fields

if TYPE_CHECKING:
    from unmerge.editing.edit import Edit

_EDIT = {
    "alpha": float | None,
    "head": str | None,
    "removed": list[int],
    "weights": dict[str, str],
    "provenance": dict[str, Any],
    "recipe": dict[str, Any],
    "layers": dict[str, dict[str, Any]],
}
LAYER_FACTS = {"shift_to": str | None, "transposed": bool, "beyond_lora": str | None}  # of a layer beside its tensors
# Of where an edit comes from, what pages and cards show; an edit may lack any of it.
_SHOWN = {
    "samples": dict[str, int],
    "classes": list[int],
    "choices": dict[str, str],
    "verdict": dict[str, Any] | None,
}


def check_edit(header: Any) -> None:
    """Raise TypeError where the header of an edit has not the form that `Edit.to_dict` gives it."""
    check_fields(header, _EDIT)
    for name, entry in header["layers"].items():
        check_fields(entry, LAYER_FACTS, f"layer {name!r}")
    provenance = header["provenance"]
    check_fields(provenance, {name: form for name, form in _SHOWN.items() if name in provenance}, "its provenance")
    if provenance.get("verdict") is not None:
        check_fields(provenance["verdict"], {"kind": str, "sentence": str}, "its verdict")


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


def recipe_of(values: Mapping[str, Any]) -> Recipe:
    """The recipe that a file holds, also as earlier versions wrote it."""
    values = {"refit": None, **values}  # none for an edit from before there was one
    for former in ("lone_strength", "kept_length"):  # knobs that are gone; what they did is in B
        values.pop(former, None)
    basis = BASES.get(values.get("basis", "auto"))
    if basis is not None and basis.closed:
        values["solver"] = "exact"  # which closed forms of then did not ask for, and had none of
    return Recipe.from_dict(values)
