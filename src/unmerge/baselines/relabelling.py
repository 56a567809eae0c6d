"""Random label (Graves et al., 2021): train on everything, the forget samples with labels that mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.samples import Data, Samples, chunks, gather
from unmerge.baselines.training import Training, loss_of, train


def random_label(
    model: nn.Module, forget: Data, retain: Data, *, epochs: int = 10, lr: float = 0.01, **options: Any
) -> nn.Module:
    """A copy of the model trained on forget ∪ retain, the forget labels drawn uniformly anew each epoch.

    options: the other fields of `Training`.
    """
    training = Training.of(options, epochs=epochs, lr=lr)
    with working_copy(model, training.seed) as result:
        samples = gather(result, forget, retain, forward=training.forward, hold=training.hold)
        return relabel(result, samples, training, "random label")


def relabel(
    model: nn.Module, samples: Samples, training: Training, what: str, after_step: Callable[[], None] | None = None
) -> nn.Module:
    """The model, trained in place on all samples, the forget labels drawn first in every epoch."""
    every = torch.arange(len(samples.labels))

    def epoch(generator: torch.Generator) -> Iterable[Tensor]:
        drawn = torch.randint(samples.classes, (samples.forget_count,), generator=generator)
        relabelled = samples.relabelled(drawn)
        for chosen in samples.shuffled(every, training.batch_size, generator):
            yield loss_of(model, relabelled, chosen, training)

    return train(model, epoch, len(chunks(every, training.batch_size)), training, what, after_step)
