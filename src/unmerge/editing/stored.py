"""What the file of an edit says of it, and whether what was read from one has that form."""

from __future__ import annotations

from typing import Any

from unmerge.storage.forms import check_fields

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
