"""compose(): several edits of one checkpoint as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unmerge.editing.edit import Edit
from unmerge.editing.layer_edit import LayerEdit
from unmerge.errors import EditError, listing
from unmerge.version import VERSION

_NEGLIGIBLE = 1e-6  # of a direction's size, below which the others hold it


def compose(edits: Sequence[Edit], alphas: Sequence[float] | None = None) -> Edit:
    """One edit whose result at alpha 1 is that of applying all, each at its own strength, with orthonormal bases.

    alphas: the strength of each; by default what each recommends. An edit of strength 0 is left out, with the rows that
    it removes. The edits must be fitted on the same weights.
    """
    edits = [] if isinstance(edits, Edit) else list(edits)
    if not edits or not all(isinstance(edit, Edit) for edit in edits):
        raise EditError("compose needs a list of edits, for example compose([edit_a, edit_b]).")
    pairs = [pair for pair in zip(edits, _strengths(edits, alphas), strict=True) if pair[1] > 0]
    if not pairs:
        raise EditError("every strength is 0, so nothing is left to compose. Pass alphas= with one above 0.")
    edits = [edit for edit, _ in pairs]
    weights: dict[str, str] = {}
    for edit in edits:
        other = [name for name, checksum in edit.weights.items() if weights.setdefault(name, checksum) != checksum]
        if other:
            raise EditError(
                f"the edits were fitted on different weights of {listing(other)}. Fit each on the same checkpoint, as "
                "fit(statistics=...) does also when another edit is applied."
            )
    heads = {edit.head for edit in edits if edit.head is not None}
    if len(heads) > 1:
        raise EditError(f"the edits have different classifiers: {listing(sorted(heads))}.")
    names = list(dict.fromkeys(name for edit in edits for name in edit.layers))
    layers = {
        name: _joined([(edit.layers[name], alpha) for edit, alpha in pairs if name in edit.layers]) for name in names
    }
    refits = {edit.recipe.refit if edit.recipe.traits.dosed else None for edit in edits}
    lengths = {edit.recipe.answer_length for edit in edits}
    parts: list[dict[str, Any]] = [
        {"alpha": alpha, "removed": list(edit.removed), "recipe": edit.recipe.to_dict(), **edit.provenance}
        for edit, alpha in pairs
    ]
    return Edit(
        layers=layers,
        recipe=edits[0].recipe.but(
            layers=names,
            alpha=1.0,
            refit=refits.pop() if len(refits) == 1 else None,
            answer_length=lengths.pop() if len(lengths) == 1 else "auto",
        ),
        alpha=1.0,
        head=next(iter(heads), None),
        removed=tuple(sorted({row for edit in edits for row in edit.removed})),
        weights=weights,
        provenance={"unmerge": VERSION, "composed_of": parts},
    )


def _strengths(edits: list[Edit], alphas: Sequence[float] | None) -> list[float]:
    if alphas is None:
        unknown = [place for place, edit in enumerate(edits) if edit.alpha is None]
        if unknown:
            raise EditError(
                f"the edits at places {unknown} recommend no strength. Pass alphas=, one for each edit; "
                "unmerge.search_alpha finds one."
            )
        return [float(edit.alpha) for edit in edits if edit.alpha is not None]
    if len(alphas) != len(edits):
        raise EditError(f"there are {len(edits)} edits and {len(alphas)} alphas; expected one for each.")
    return [edit._strength(alpha) for edit, alpha in zip(edits, alphas, strict=True)]


def _joined(parts: list[tuple[LayerEdit, float]]) -> LayerEdit:
    """Σ α B Qᵀ as one B Qᵀ with orthonormal Q."""
    first = parts[0][0]
    if len({(layer.shift_to, layer.transposed) for layer, _ in parts if layer.shift_to is not None}) > 1:
        raise EditError(f"the edits put their constants in different places: {first.shift_to!r} and another.")
    device = first.B.device
    stacked = torch.cat([layer.B.to(device).double() * alpha for layer, alpha in parts], dim=-1)
    columns = torch.cat([layer.Q.to(device).double() for layer, _ in parts], dim=-1)
    basis, coefficients = _orthonormal(columns, stacked)
    shifts = [alpha * layer.shift.to(device).double() for layer, alpha in parts if layer.shift is not None]
    return LayerEdit(
        B=coefficients.to(first.B),
        Q=basis.to(first.Q),
        shift=torch.stack(shifts).sum(0).to(first.B) if shifts else None,
        shift_to=next((layer.shift_to for layer, _ in parts if layer.shift_to is not None), None),
        transposed=first.transposed,
        beyond_lora=first.beyond_lora,
    )


def _orthonormal(columns: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Q and B' with B' Qᵀ = B columnsᵀ; directions that all groups hold twice are dropped."""
    if not columns.shape[-1]:  # a classifier of which rows are removed, and nothing else
        return columns, coefficients
    left, sizes, right = torch.linalg.svd(columns, full_matrices=False)
    kept = (sizes > _NEGLIGIBLE * sizes.amax(-1, keepdim=True)).sum(-1).amax()
    return left[..., :kept], (coefficients @ (sizes.unsqueeze(-1) * right)[..., :kept, :].mT)
