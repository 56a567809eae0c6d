"""An edit of a run, with the BatchNorm statistics and the classifier that were estimated at its strength."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.cli.run_directory import check_folder
from unmerge.distributed.warning import warn
from unmerge.editing.edit import Edit
from unmerge.errors import EditError, FileError, UnmergeWarning, listing
from unmerge.model.evaluating import batch_norms
from unmerge.model.layers import tensor_name
from unmerge.model.ledger import ledger_of
from unmerge.placement.state import state_of
from unmerge.storage.files import read_tensors, write_tensors
from unmerge.storage.fingerprint import fingerprint
from unmerge.storage.forms import check_fields

NORMS = "norms.safetensors"
_KIND = "norms"


def norms_matter(edit: Edit, module: nn.Module, batch: Any) -> bool:
    """Whether a BatchNorm lies behind the edited layers."""
    if not batch_norms(module):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmergeWarning)  # which says that none does
        plain = replace(edit, recipe=edit.recipe.but(refit=None))
        with plain.applied(module, plain.alpha or 1.0, recalibrate=[batch], force=True):
            return bool(ledger_of(module).entries[-1].recalibrated)


def norms_of(module: nn.Module) -> dict[str, Tensor]:
    """What recalibration with the last edit wrote."""
    state = state_of(module)
    return {name: state[name].detach().clone() for name in ledger_of(module).entries[-1].recalibrated}


def write_norms(directory: Path, norms: dict[str, Tensor], alpha: float | None) -> None:
    write_tensors(directory / NORMS, norms, _KIND, {"alpha": alpha})


def apply(
    directory: Path,
    module: nn.Module,
    alpha: float | None = None,
    recalibrate: Iterable[Any] | None = None,
    forget: Iterable[Any] | None = None,
    force: bool = False,
) -> tuple[Edit, float | None, bool]:
    """Apply the edit in a directory; returns it, its strength and whether BatchNorm was re-estimated."""
    edit = Edit.load(edit_in(directory))
    strength = edit.alpha if alpha is None else alpha
    is_base = not ledger_of(module).entries and _carries(module, edit.weights)
    edit.apply(module, strength, recalibrate=recalibrate, forget=forget, force=force)
    path = directory / NORMS
    if recalibrate is not None or not path.is_file():
        return edit, strength, recalibrate is not None
    norms, header = read_tensors(path, _KIND)
    try:
        check_fields(header, {"alpha": float})
    except TypeError as error:
        raise FileError(f"{path} was written by another version of unmerge: {error}.") from error
    if header["alpha"] != strength:
        warn(
            f"the run re-estimated {_what(edit, norms)} at alpha={header['alpha']:g}; at {strength:g} that stays as "
            "the edit leaves it. Pass --recalibrate with the data flags of the run to do so here."
        )
        return edit, strength, False
    state = state_of(module)
    if not is_base and is_refitted(edit, norms):
        warn(
            "the model is not the one that the run was on, so its classifier is not that of the run but what the edit "
            "makes of it. Pass --recalibrate with the data flags of the run to fit it."
        )
        norms = {name: value for name, value in norms.items() if name not in _head_tensors(edit)}
    strange = [name for name, value in norms.items() if name not in state or not _fits(value, state[name])]
    if strange:
        raise EditError(f"{path} belongs to another model: {listing(strange)}.")
    with torch.no_grad():
        for name, value in norms.items():
            state[name].copy_(value)
    return edit, strength, True


def is_refitted(edit: Edit, norms: Mapping[str, Tensor]) -> bool:
    """Whether recalibration wrote the classifier, too."""
    return any(name in norms for name in _head_tensors(edit))


def _head_tensors(edit: Edit) -> list[str]:
    return [] if edit.head is None else [tensor_name(edit.head, part) for part in ("weight", "bias")]


def _what(edit: Edit, norms: Mapping[str, Tensor]) -> str:
    return "BatchNorm and the classifier" if is_refitted(edit, norms) else "BatchNorm"


def _carries(module: nn.Module, weights: Mapping[str, str]) -> bool:
    state = state_of(module)
    return fingerprint({name: state[name] for name in weights if name in state}) == weights


def _fits(value: Tensor, place: Tensor) -> bool:
    return value.shape == place.shape and value.dtype == place.dtype and bool(value.isfinite().all())


def edit_in(directory: Path) -> Path:
    """Where the edit lies: in the directory of a run, or there itself."""
    check_folder(directory, "what unmerge run wrote, or its edit/")
    return directory / "edit" if (directory / "edit").is_dir() else directory
