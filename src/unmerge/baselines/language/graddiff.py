"""GradDiff (Maini et al., 2024): ascend on forget while descending on retain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from unmerge.baselines.language.losses import mean_loss
from unmerge.baselines.language.sequences import TokenBatch, read_sequences
from unmerge.baselines.language.training import LanguageTraining, unlearn


def grad_diff(model: nn.Module, forget: Iterable[Any], retain: Iterable[Any], **options: Any) -> nn.Module:
    """A copy of the model trained on −CE(forget) + CE(retain). options: fields of `LanguageTraining`."""

    def loss(changed: nn.Module, lost: TokenBatch, kept: TokenBatch, places: list[int]) -> Tensor:
        return mean_loss(changed, kept) - mean_loss(changed, lost)

    pools = read_sequences(forget, "forget"), read_sequences(retain, "retain")
    return unlearn(model, *pools, loss, LanguageTraining.of(options), "GradDiff")
