"""Some samples of batches, as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from unmerge.data.batches import DEALT, first_tensor, select_samples
from unmerge.tokens import IGNORED


class ChosenSamples:
    """The samples at some places of an iterable of batches, in batches, as often as it is read.

    groups: in a mapping they are dealt out, in the order of the places, to so many classes below 0, which no label is.
    """

    def __init__(self, data: Iterable[Any], places: Iterable[int], groups: int = 0) -> None:
        self.data, self._groups = data, groups
        self._numbers = {place: number for number, place in enumerate(places)}

    def __iter__(self) -> Iterator[Any]:
        start, held, widens, has_right_padding = 0, list[Any](), True, False
        for batch in self.data:
            size, padding = len(first_tensor(batch)), _padding(batch)
            has_right_padding |= padding == "right"
            for part in self.among(batch, start):
                # Few samples of each of many texts' batches would take nearly as long as all of them.
                count = sum(len(first_tensor(each)) for each in [*held, part])
                # Wider padding changes nothing on the right; elsewhere a mask may count positions from the end.
                is_right = padding == "right" or (padding == "none" and has_right_padding)
                if held and not (count <= size and _fit(held[0], part, widens and is_right)):
                    yield _joined(held)
                    held = []
                widens = is_right and (widens or not held)
                held.append(part)
            start += size
        if held:
            yield _joined(held)

    def among(self, batch: Any, start: int) -> Iterator[Any]:
        """The chosen samples of a batch whose first has the place `start`, as one batch; nothing where it has none."""
        chosen = [place for place in range(len(first_tensor(batch))) if start + place in self._numbers]
        if not chosen:
            return
        part = select_samples(batch, torch.tensor(chosen))
        if self._groups and isinstance(part, Mapping):
            dealt = torch.tensor([-1 - self._numbers[start + place] % self._groups for place in chosen])
            part = {**part, DEALT: dealt}
        yield part


def _padding(batch: Any) -> str:
    """On which side texts are padded: "right", "left", "none", or "unknown"."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return "unknown"
    if not mask[:, -1].all():
        return "right"
    return "none" if mask.all() else "left"


def _fit(first: Any, other: Any, widens: bool) -> bool:
    """Whether two batches are texts of the same kind, and of the same width unless that may grow."""
    texts = [
        isinstance(batch, Mapping)
        and {"input_ids", "attention_mask"} <= batch.keys()
        and batch["input_ids"].dim() == 2
        and all(_is_text(batch, value) or _is_column(batch, value) for value in batch.values())
        for batch in (first, other)
    ]
    if not all(texts) or first.keys() != other.keys():
        return False
    return widens or first["input_ids"].shape[1] == other["input_ids"].shape[1]


def _joined(batches: list[Any]) -> Any:
    """Several batches of texts as one, the shorter ones padded on the right."""
    if len(batches) == 1:
        return batches[0]
    width = max(batch["input_ids"].shape[1] for batch in batches)
    found = {}
    for name, value in batches[0].items():
        filler = IGNORED if name == "labels" else 0
        parts = [batch[name] for batch in batches]
        if _is_text(batches[0], value):
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filler) for part in parts]
        found[name] = torch.cat(parts)
    return found


def _is_text(batch: Mapping[str, Any], value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == batch["input_ids"].shape and value.dim() == 2


def _is_column(batch: Mapping[str, Any], value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == batch["input_ids"].shape[:1]
