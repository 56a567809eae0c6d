"""How well a classifier does on labelled batches: what the search for a strength looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.batches import Forward, classifier_logits, feed, labels_of, on_device
from unmerge.distributed import summed
from unmerge.errors import DataError
from unmerge.normalization import evaluating
from unmerge.reading import Reading


@torch.no_grad()
def accuracy(model: nn.Module, data: Iterable[Any], forward: Forward | None = None) -> float:
    """The share of labelled samples that a classifier labels right."""
    right = total = 0
    with evaluating(model):
        for piece in Reading(model, data, "accuracy", forward):
            logits, labels = _logits(model, piece.batch, forward), labels_of(piece.batch)
            if labels is None:
                raise DataError(
                    "a batch has no class labels (a 1-D integer tensor, one a sample), so there is no accuracy to "
                    "look at. Give batches as (inputs, labels), or pass metric=, a function (model, data) -> number."
                )
            right += int((logits.argmax(1) == labels.to(logits.device)).sum())
            total += len(labels)
    right, total = summed(right, total)
    return right / total


@torch.no_grad()
def divergence(model: nn.Module, reference: nn.Module, data: Iterable[Any], forward: Forward | None = None) -> float:
    """KL(p_model ‖ p_reference), the mean over the data."""
    total, count = 0.0, 0
    with evaluating(model), evaluating(reference):
        for piece in Reading(model, data, "divergence", forward):
            answers = (_logits(which, piece.batch, forward) for which in (model, reference))
            mine, theirs = (logits.double().log_softmax(1) for logits in answers)
            total += (mine.exp() * (mine - theirs.to(mine.device))).sum().item()
            count += len(mine)
    total, count = summed(total, count)
    return total / count


def _logits(model: nn.Module, batch: Any, forward: Forward | None) -> Tensor:
    output = feed(model, on_device(model, batch), forward)
    return classifier_logits(output, ", or metric=, a function (model, data) -> number")
