"""Bootstrap intervals of figures that are means of right-or-wrong answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from unmerge.evaluation.result import Figure

Draws = np.ndarray  # (..., draws)


def resampled_means(hits: Sequence[Tensor], draws: int, *seed: int) -> Draws:
    """The means of several 0/1 answers to the same samples in `draws` resamples, as (answers, draws).

    Samples with the same answers are alike, so a resample is one multinomial draw of how often each
    pattern of answers comes: the same distribution as drawing samples one by one.
    """
    table = np.stack([row.cpu().numpy().astype(bool) for row in hits])
    samples = table.shape[1]
    patterns, counts = np.unique(table, axis=1, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(samples, counts / samples, size=draws)
    return patterns.astype(float) @ drawn.T / samples


def paired_means(own: Tensor, other: Tensor, draws: int, *seed: int) -> Draws:
    """Resampled means of two models' answers: to the same samples together, to different ones apart."""
    if len(own) == len(other):
        return resampled_means([own, other], draws, *seed)
    return np.concatenate([resampled_means([hits], draws, *seed, side) for side, hits in enumerate((own, other))])


def with_interval(value: float, draws: Draws, level: float) -> Figure:
    """The figure with its percentile interval; one without spread (all right, all wrong) has width 0."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Figure(float(value), float(low), float(high))
