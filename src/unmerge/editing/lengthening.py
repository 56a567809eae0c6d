"""How much longer a refit makes the mean answers to forgotten classes, where the recipe leaves it open."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Mean answers are drawn towards a share of a typical answer's length; where the class nearest to theirs goes as well,
# they are made at least 1.3 times as long (docs/findings.md).
_SHARE, _PULL, _WITH_NEAREST = 0.55, 0.6, 1.3


def factors(lengths: Tensor, typical: Tensor, nearest: Tensor) -> Tensor:
    """How many times as long mean answers of some lengths are to be: (share · typical / length)^pull, at least 1.

    Retraining gives forgotten classes mean answers of more equal lengths than an edit leaves.
    nearest: whether the class nearest to each is forgotten too.
    """
    shortest = (1e-6 * typical).clamp_min(torch.finfo(lengths.dtype).tiny)
    least = torch.ones_like(lengths).masked_fill(nearest, _WITH_NEAREST)
    return (_SHARE * typical / lengths.clamp_min(shortest)).pow(_PULL).maximum(least)


def nearest_goes(answers: Tensor, classes: Sequence[int]) -> Tensor:
    """For the mean answer to each forgotten class (outputs, classes): is the highest output but its own one of another?

    The classes are outputs of the classifier.
    """
    labels = torch.tensor([*classes] or [-1], device=answers.device)  # without classes there is one mean, of all
    own = torch.arange(len(answers), device=answers.device)[:, None] == labels
    return torch.isin(answers.masked_fill(own, -torch.inf).argmax(0), labels)


def typical_length(weight: Tensor, bias: Tensor, products: Tensor, mean: Tensor) -> Tensor:
    """The root mean square length of a linear layer's answers to inputs, given Σ x xᵀ and Σ x per sample."""
    weight, bias = (value - value.mean(0) for value in (weight, bias))  # which a softmax does not see
    square = (weight @ products * weight).sum() + 2 * bias @ (weight @ mean) + bias.square().sum()
    return square.clamp_min(0).sqrt()
