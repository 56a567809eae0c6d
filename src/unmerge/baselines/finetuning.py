"""Fine-tuning on retain: the control that hopes to forget by not being reminded."""

from __future__ import annotations

from typing import Any

from torch import nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.samples import Data, gather
from unmerge.baselines.training import Training, train_on


def fine_tune(
    model: nn.Module, forget: Any, retain: Data, *, epochs: int = 10, lr: float = 0.01, **options: Any
) -> nn.Module:
    """A copy of the model trained on retain alone; forget is not read.

    options: the other fields of `Training`.
    """
    training = Training.of(options, epochs=epochs, lr=lr)
    with working_copy(model, training.seed) as result:
        samples = gather(result, retain=retain, forward=training.forward, hold=training.hold)
        return train_on(result, samples, samples.retain, training, "fine-tune on retain")
