"""NegGrad+ (Kurmanji et al., 2023): descend on retain while ascending on forget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.options import check_name, check_number
from unmerge.baselines.samples import Data, chunks, gather
from unmerge.baselines.training import Training, loss_of, train


def neggrad_plus(
    model: nn.Module,
    forget: Data,
    retain: Data,
    *,
    alpha: float = 0.5,
    epoch_over: str = "forget",
    epochs: int = 10,
    lr: float = 1e-4,
    **options: Any,
) -> nn.Module:
    """A copy of the model trained on α·CE(retain) − (1 − α)·CE(forget), a batch of each a step.

    epoch_over: an epoch reads "forget" once with as many retain samples, drawn anew (the paper), or "retain" once
        with forget repeated (the public code).
    options: the other fields of `Training`.
    """
    training = Training.of(options, epochs=epochs, lr=lr)
    check_number("alpha", alpha, 0, 1)
    check_name("epoch_over", epoch_over, ("forget", "retain"))
    with working_copy(model, training.seed) as result:
        samples = gather(result, forget, retain, forward=training.forward, hold=training.hold)
        length = len(samples.forget if epoch_over == "forget" else samples.retain)

        def epoch(generator: torch.Generator) -> Iterable[Tensor]:
            size = training.batch_size
            pairs = [samples.shuffled(places, size, generator, length) for places in (samples.forget, samples.retain)]
            for forgotten, kept in zip(*pairs, strict=True):
                # Two passes: in one, BatchNorm would normalise each pool with the other's statistics.
                retain_loss = loss_of(result, samples, kept, training)
                forget_loss = loss_of(result, samples, forgotten, training)
                yield alpha * retain_loss - (1 - alpha) * forget_loss

        steps = len(chunks(torch.arange(length), training.batch_size))
        return train(result, epoch, steps, training, "NegGrad+")
