"""Losses of a causal language model at the labelled tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unmerge.baselines.language.sequences import TokenBatch
from unmerge.data.batches import logits_of
from unmerge.errors import DataError


def token_losses(model: nn.Module, batch: TokenBatch) -> Tensor:
    """The cross-entropy of each labelled token, in float32 or wider."""
    logits = logits_of(model(**batch.inputs))
    if logits is None or logits.dim() != 3:
        raise DataError("the model returned no logits (samples, tokens, vocabulary): it is no causal language model.")
    # Only the positions that count: the vocabulary is wide.
    chosen = logits[batch.rows, batch.columns]
    wide = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, batch.targets, reduction="none")


def mean_loss(model: nn.Module, batch: TokenBatch) -> Tensor:
    """The mean over all labelled tokens of the batch."""
    return token_losses(model, batch).mean()


def log_probabilities(model: nn.Module, batch: TokenBatch) -> Tensor:
    """log p of each sequence's response: the sum over its tokens."""
    losses = token_losses(model, batch)
    # Placed, then summed by row: a GPU would add them up in place in another order at every run.
    return -losses.new_zeros(batch.labels.shape).index_put((batch.rows, batch.columns), losses).sum(1)
