"""Labels that a batch seems to hold in a form that is not read: without them a request is another one."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmerge.data.batches import first_tensor, labels_of

_NAMES = ("label", "label_ids", "targets")  # that data sets have in place of "labels"


def unread_labels(batch: Any) -> str | None:
    """What looks like class labels though `labels_of` finds none, and what to type; None where nothing does."""
    if labels_of(batch) is not None:
        return None
    size = len(first_tensor(batch))
    if isinstance(batch, Mapping):
        if "labels" in batch:
            return _told("its entry 'labels'", batch["labels"], size)
        name = next((name for name in _NAMES if _is_whole(batch.get(name), size)), None)
        return None if name is None else f"its labels are called {name!r}: rename them to 'labels'"
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return _told("its second entry", batch[1], size)
    return None


def _told(place: str, value: Any, size: int) -> str | None:
    if not isinstance(value, Tensor):
        plain = isinstance(value, (list, tuple)) and all(isinstance(entry, Integral) for entry in value)
        if (plain or isinstance(value, np.ndarray)) and len(value) == size:
            return f"{place} is a {type(value).__name__}: pass torch.tensor(...) of it"
        return None
    if value.shape[:1] != (size,):
        return None
    if value.dim() == 1:
        return f"{place} is of {value.dtype}: pass it .long()" if _is_integral(value) else None
    if value.shape == (size, 1) and _is_integral(value):
        return f"{place} has the shape {tuple(value.shape)}: pass it .squeeze(1).long()"
    is_one_hot = value.dim() == 2 and bool(((value == 0) | (value == 1)).all() and (value.sum(1) == 1).all())
    return f"{place} is one-hot: pass it .argmax(1)" if is_one_hot else None


def _is_whole(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (size,) and _is_integral(value)


def _is_integral(value: Tensor) -> bool:
    """Whether the values are classes, whatever type they have."""
    return value.dtype != torch.bool and bool((value == value.round()).all() if value.is_floating_point() else True)
