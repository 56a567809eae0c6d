"""Labels that a batch seems to hold in a form that is not read: without them a request is another one."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmerge.data.batches import first_tensor, labels_of

_READ = ("group", "labels")  # what `labels_of` takes of a mapping, the first that is there
_OTHERS = ("label", "label_ids", "targets")  # what data sets have in place of "labels"


def unread_labels(batch: Any) -> str | None:
    """What looks like class labels though `labels_of` finds none, and what to type; None where nothing does."""
    if labels_of(batch) is not None:
        return None
    inputs = first_tensor(batch)
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return _told("its second entry", batch[1], len(inputs))
    if not isinstance(batch, Mapping):
        return None
    for name in _READ:
        if name in batch:
            return _told(f"its entry {name!r}", batch[name], len(inputs))
    for name in _OTHERS:
        if labels_of((inputs, batch.get(name))) is not None:
            return f"its labels are called {name!r}: rename them to 'labels'"
        told = _told(f"its entry {name!r}", batch.get(name), len(inputs))
        if told is not None:
            return f"{told}, and rename it to 'labels'"
    return None


def _told(place: str, value: Any, size: int) -> str | None:
    if isinstance(value, (list, tuple)) and len(value) == size and all(map(_is_class, value)):
        return f"{place} is a {type(value).__name__}: pass torch.tensor(...) of it"
    if isinstance(value, np.ndarray) and value.shape == (size,) and value.dtype.kind in "iu":
        return f"{place} is an ndarray: pass torch.tensor(...) of it"
    if not isinstance(value, Tensor) or value.shape[:1] != (size,):
        return None
    if value.dim() == 1:
        return f"{place} is of {value.dtype}: pass it .long()" if _is_integral(value) else None
    if value.shape == (size, 1) and _is_integral(value):
        return f"{place} has the shape {tuple(value.shape)}: pass it .squeeze(1).long()"
    is_one_hot = value.dim() == 2 and bool(((value == 0) | (value == 1)).all() and (value.sum(1) == 1).all())
    return f"{place} is one-hot: pass it .argmax(1)" if is_one_hot else None


def _is_class(entry: Any) -> bool:
    return isinstance(entry, Integral) and not isinstance(entry, bool)


def _is_integral(value: Tensor) -> bool:
    """Whether the values are classes, whatever type they have."""
    return value.dtype != torch.bool and bool((value == value.round()).all() if value.is_floating_point() else True)
