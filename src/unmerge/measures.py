"""How well a classifier or a language model does on labelled batches: what the search for a strength looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unmerge import tokens
from unmerge.data.batches import Forward, classifier_logits, feed, labels_of, logits_of, on_device
from unmerge.data.reading import Reading
from unmerge.distributed.processes import summed
from unmerge.errors import DataError
from unmerge.model.evaluating import evaluating


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
    if not total:
        raise DataError("the batches hold no sample, so there is no accuracy to look at.")
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
    if not count:
        raise DataError("the batches hold no sample, so there is no divergence to look at.")
    return total / count


@torch.no_grad()
def answer_probability(model: nn.Module, data: Iterable[Any], forward: Forward | None = None) -> float:
    """The mean answer probability of a language model: over texts, exp(−mean loss of the tokens that have a label)."""
    total, count = 0.0, 0
    with evaluating(model):
        for piece in Reading(model, data, "answers", forward):
            found = answer_probabilities(model, piece.batch, forward)
            total += found.sum().item()
            count += len(found)
    total, count = summed(total, count)
    if not count:
        raise DataError("no token of the texts has a label, so there is no answer to look at.")
    return total / count


def answer_probabilities(model: nn.Module, batch: Any, forward: Forward | None = None) -> Tensor:
    """The answer probability of each text in a batch; texts without a labelled token are left out."""
    batch = on_device(model, batch)
    counted, targets = tokens.answer(batch)[:, 1:], batch["labels"][:, 1:]
    logits = logits_of(feed(model, batch, forward))
    if logits is None or logits.dim() != 3:
        raise DataError("the model returned no logits (samples, tokens, vocabulary). Pass forward= that returns them.")
    rows, columns = counted.nonzero(as_tuple=True)
    # Only the positions whose next token counts: the vocabulary is wide.
    chosen = logits[rows, columns]
    wide = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    losses = nn.functional.cross_entropy(wide, targets[rows, columns], reduction="none").double()
    sums = losses.new_zeros(len(targets)).index_add(0, rows, losses)
    lengths = counted.sum(1)
    return torch.exp(-sums / lengths)[lengths > 0]


def _logits(model: nn.Module, batch: Any, forward: Forward | None) -> Tensor:
    output = feed(model, on_device(model, batch), forward)
    otherwise = ", or metric=, a function (model, data) -> number such as unmerge.measures.answer_probability"
    return classifier_logits(output, otherwise)
