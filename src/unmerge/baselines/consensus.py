"""NegMerge (Kim et al., 2025): of several forget task vectors, only what all agree on is subtracted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.options import BaselineError, check_number
from unmerge.baselines.samples import Data
from unmerge.baselines.selection import Candidate, Weights
from unmerge.baselines.task_vectors import ALPHAS, forget_vector, held_samples, strengths, subtracted
from unmerge.baselines.training import Training


def neg_merge(
    model: nn.Module,
    forget: Data,
    retain: Data | None = None,
    *,
    alpha: float | Sequence[float] = ALPHAS,
    rates: Sequence[float] = (0.5, 1.0, 2.0),
    buffers: str = "keep",
    epochs: int = 5,
    lr: float = 1e-3,
    samples: int | None = 5000,
    trace: list[Candidate] | None = None,
    **options: Any,
) -> nn.Module:
    """A copy of the model less α times the mean of several forget task vectors where all have one sign.

    rates: the factors of `lr`, a fine-tuning on forget each, all from the same seed.
    The other options are those of `neg_tv`, also what happens to BatchNorm statistics.
    """
    training = Training.of(options, epochs=epochs, lr=lr)
    alphas = strengths(alpha)
    if isinstance(rates, str) or not isinstance(rates, Sequence) or not rates:
        raise BaselineError(f"rates={rates!r} is not a list of factors of lr, for example [0.5, 1, 2].")
    for rate in rates:
        check_number("rates", rate, 0, above=True)
    with working_copy(model, training.seed) as result:
        held = held_samples(result, forget, retain, alphas, buffers, samples, training, trace)
        vectors = [
            forget_vector(result, held, replace(training, lr=rate * lr), buffers == "subtract") for rate in rates
        ]
        merged: Weights = {name: unanimous(torch.stack([vector[name] for vector in vectors])) for name in vectors[0]}
        return subtracted(result, merged, held, alphas, buffers, training, "NegMerge", trace)


def unanimous(changes: Tensor) -> Tensor:
    """The mean over the first dimension where all have the same sign, zero elsewhere."""
    signs = changes.sign()
    return torch.where((signs == signs[0]).all(0), changes.mean(0), 0)
