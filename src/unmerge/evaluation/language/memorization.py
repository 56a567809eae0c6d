"""How much of the answers a model has by heart, from one teacher-forced pass; end-of-sequence tokens do not count."""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.evaluation.language.scoring import TokenScores


def exact_memorization(scores: TokenScores) -> Tensor:
    """The share of each answer's tokens that are the model's likeliest."""
    return torch.stack([hits.mean() for hits in scores.answers(scores.hits)])


def extraction_strength(scores: TokenScores) -> Tensor:
    """1 − k/n for each answer: given its first k tokens the model completes the other n − k word for word.

    Where not even the last token comes k is n − 1, as in OpenUnlearning, so that figures compare.
    """
    found = []
    for hits in scores.answers(scores.hits):
        # Ones from the back until the first miss.
        completed = hits.flip(0).cumprod(0).sum().clamp_min(1)
        found.append(completed / len(hits))
    return torch.stack(found)
