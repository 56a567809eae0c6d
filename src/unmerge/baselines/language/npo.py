"""NPO (Zhang et al., 2024): forget answers as the rejected ones of a preference against the model itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.language.losses import log_probabilities, mean_loss
from unmerge.baselines.language.sequences import Sequences, TokenBatch, read_sequences
from unmerge.baselines.language.training import LanguageTraining, unlearn
from unmerge.baselines.options import check_number
from unmerge.data.batches import device_of
from unmerge.model.evaluating import evaluating


def npo(
    model: nn.Module, forget: Iterable[Any], retain: Iterable[Any], *, beta: float = 0.1, **options: Any
) -> nn.Module:
    """A copy trained on −(2/β) mean log σ(−β log π/π_ref) on forget + CE(retain), π_ref being the model as given.

    The log-probabilities of a sequence are summed over its tokens. options: fields of `LanguageTraining`.
    """
    check_number("beta", beta, 0, above=True)
    training = LanguageTraining.of(options)
    lost = read_sequences(forget, "forget")
    reference = _reference(model, lost, training)

    def loss(changed: nn.Module, batch: TokenBatch, kept: TokenBatch, places: list[int]) -> Tensor:
        ratios = log_probabilities(changed, batch) - reference[places]
        return -2 / beta * nn.functional.logsigmoid(-beta * ratios).mean() + mean_loss(changed, kept)

    return unlearn(model, lost, read_sequences(retain, "retain"), loss, training, "NPO")


def _reference(model: nn.Module, sequences: Sequences, training: LanguageTraining) -> Tensor:
    """log π_ref of every forget sequence: the reference stays as it is, so one pass serves all epochs."""
    device = device_of(model)
    with evaluating(model), training.precision(device):
        parts = torch.arange(len(sequences)).split(training.batch_size)
        return torch.cat([log_probabilities(model, sequences.take(part.tolist(), device)) for part in parts])
