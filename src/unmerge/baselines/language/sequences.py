"""The token sequences of a pool, read once and kept without their padding, so that any can be drawn together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmerge.data.batches import batches
from unmerge.errors import DataError
from unmerge.tokens import IGNORED


@dataclass(frozen=True)
class TokenBatch:
    """Sequences padded on the right, on a device, and the positions whose next token has a label."""

    inputs: dict[str, Tensor]  # input_ids alone: no token sees the padding, which is behind it
    labels: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor  # the next tokens at those positions


@dataclass(frozen=True)
class Sequences:
    """The tokens and the labels of each sequence, in host memory."""

    tokens: list[Tensor]
    labels: list[Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def take(self, places: Sequence[int], device: torch.device) -> TokenBatch:
        """A batch of some sequences, padded on the right."""
        tokens = pad_sequence([self.tokens[place] for place in places], batch_first=True)
        labels = pad_sequence([self.labels[place] for place in places], batch_first=True, padding_value=IGNORED)
        # Found here: on the device it would wait for all that is under way.
        rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        targets = labels[rows, columns + 1]
        ids, labels, rows, columns, targets = (
            tensor.to(device, non_blocking=True) for tensor in (tokens, labels, rows, columns, targets)
        )
        return TokenBatch({"input_ids": ids}, labels, rows, columns, targets)


def read_sequences(data: Iterable[Any], what: str) -> Sequences:
    """All sequences of some batches: mappings with input_ids, token labels and, where there is padding, a mask."""
    tokens: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches(data, what):
        _check(batch, what)
        mask = batch.get("attention_mask")
        for row, (ids, targets) in enumerate(zip(batch["input_ids"].cpu(), batch["labels"].cpu(), strict=True)):
            kept = slice(None) if mask is None else mask[row].cpu().bool()
            tokens.append(ids[kept])
            labels.append(targets[kept])
    silent = [place for place, own in enumerate(labels) if not (own[1:] != IGNORED).any()]
    if silent:
        raise DataError(f"{what}: sequence {silent[0]} has no label but {IGNORED}, so there is nothing to learn from.")
    return Sequences(tokens, labels)


def _check(batch: Any, what: str) -> None:
    fits = isinstance(batch, Mapping) and all(
        isinstance(batch.get(name), Tensor) and batch[name].dim() == 2 for name in ("input_ids", "labels")
    )
    if not fits or batch["input_ids"].shape != batch["labels"].shape:
        found = (
            {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
            if isinstance(batch, Mapping)
            else type(batch).__name__
        )
        raise DataError(
            f"{what}: a batch is {found}; expected a mapping with input_ids and labels of the same shape (samples, "
            f"tokens), {IGNORED} where there is no loss."
        )
