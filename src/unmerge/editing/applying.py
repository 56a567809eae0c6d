"""Applying an edit to a model: every check first, then all layers or none, then what lies behind them follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, check_iterable, check_rereadable
from unmerge.data.reading import Reading
from unmerge.distributed.warning import warn
from unmerge.editing.binding import check_model
from unmerge.editing.recalibration import norm_inputs, norms_behind, recalibrate
from unmerge.editing.refitting import refitted
from unmerge.errors import EditError, listing
from unmerge.model.evaluating import evaluating
from unmerge.model.layers import tensor_name
from unmerge.model.ledger import Entry, change, entry_of
from unmerge.placement.sharded import is_finite
from unmerge.placement.state import state_of
from unmerge.placement.writing import check_changeable, write

if TYPE_CHECKING:
    from unmerge.editing.edit import Edit

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def apply_edit(
    edit: Edit,
    model: nn.Module,
    alpha: float,
    head_alpha: float,
    retained: Iterable[Any] | None,
    forgotten: Iterable[Any] | None,
    forward: Forward | None,
    force: bool,
) -> None:
    """Change the model in place, and with `retained` data re-estimate and refit what the edit left behind it."""
    if forgotten is not None:
        check_iterable(forgotten, "forget")
        if retained is None:
            raise EditError("forget= goes with recalibrate=. Pass retained batches as recalibrate= as well.")
    if entry_of(model, edit) is not None:
        raise EditError("this model carries this edit already. Call edit.revert(model) first.")
    check_model(edit, model, force)
    entry = Entry(edit, alpha, head_alpha)
    values = edit.changes(state_of(model), alpha, head_alpha)
    _check_finite(values, f"at alpha={alpha:g} the edit makes {{}} infinite in its type; lower alpha")
    before: dict[str, Tensor] = {}
    if retained is not None:
        check_rereadable(retained, "recalibrate", "finding the BatchNorms behind the edit")
        with evaluating(model):
            first = Reading(model, retained, "recalibrate", forward).few
        before = norm_inputs(model, first, forward)
    with change(model, entry) as remember:
        remember(values)
        write(model, values)
        if retained is None:
            return
        norms = norms_behind(before, norm_inputs(model, first, forward))
        if not norms:
            warn("recalibrate= is given, but no BatchNorm lies behind the edited layers: nothing is estimated.")
            return
        entry.recalibrated = tuple(tensor_name(norm, part) for norm in norms for part in _STATISTICS)
        with torch.inference_mode(False):  # as recalibration has it, whatever mode this is
            check_changeable(state_of(model), [*entry.present, *entry.recalibrated])
        remember(entry.recalibrated)
        recalibrate(model, norms, retained, forward)
        classifier = refitted(edit, model, entry.present, retained, forgotten, forward)
        _check_finite(classifier, "the refit makes {} infinite in its type. Use Recipe(refit=None)")
        remember(classifier)
        write(model, classifier)
        entry.recalibrated += tuple(classifier)


def _check_finite(values: Mapping[str, Tensor], message: str) -> None:
    broken = [name for name, value in values.items() if not is_finite(value)]
    if broken:
        raise EditError(f"{message.format(listing(broken))}.")
