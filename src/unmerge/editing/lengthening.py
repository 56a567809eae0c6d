"""How much longer a refit makes the mean answers to forgotten classes, where the recipe leaves it open."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Classifier = tuple[Tensor, Tensor]  # weight and bias

# Mean answers are drawn towards a share of a typical answer's length; where the class nearest to theirs goes as well,
# they are made at least 1.3 times as long (docs/findings.md).
_SHARE, _PULL, _WITH_NEAREST = 0.55, 0.6, 1.3


def factors(
    means: Tensor,
    before: Tensor,
    own: Classifier,
    original: Classifier,
    rows: Tensor,
    retained: tuple[Tensor, Tensor],
    classes: Sequence[int],
) -> Tensor:
    """How many times as long the mean answer to each class is to be, over the outputs that are left (rows).

    means, before: the classifier's mean input for each class (columns), of the edited model and of the one before it,
    which have the classifiers `own` and `original`. retained: Σ e eᵀ and Σ e over retained data, per sample.
    """
    lengths = _answers(own, means, rows).norm(dim=0)
    least = torch.ones_like(lengths).masked_fill(_nearest_goes(_answers(original, before), classes), _WITH_NEAREST)
    return lengthened(lengths, _typical_length(own, rows, *retained), least)


def lengthened(lengths: Tensor, typical: Tensor, least: Tensor) -> Tensor:
    """How many times as long answers of some lengths are to be: (share · typical / length)^pull, at least `least`.

    Retraining gives forgotten classes mean answers of more equal lengths than an edit leaves.
    """
    shortest = (1e-6 * typical).clamp_min(torch.finfo(lengths.dtype).tiny)
    return (_SHARE * typical / lengths.clamp_min(shortest)).pow(_PULL).maximum(least)


def _answers(classifier: Classifier, inputs: Tensor, rows: Tensor | None = None) -> Tensor:
    """Logits (outputs, inputs), of some outputs alone, less their mean, which a softmax does not see."""
    weight, bias = classifier
    logits = weight @ inputs + bias[:, None]
    logits = logits if rows is None else logits[rows]
    return logits - logits.mean(0)


def _nearest_goes(answers: Tensor, classes: Sequence[int]) -> Tensor:
    """For each forgotten class whether the highest output but its own, in its mean answer, is of another one."""
    if not classes:
        return torch.zeros(answers.shape[1], dtype=torch.bool, device=answers.device)
    labels = torch.tensor(classes, device=answers.device)
    others = answers.scatter(0, labels[None], -torch.inf)
    return torch.isin(others.argmax(0), labels)


def _typical_length(classifier: Classifier, rows: Tensor, products: Tensor, mean: Tensor) -> Tensor:
    """The root mean square length of the answers to retained data."""
    weight, bias = (value[rows] - value[rows].mean(0) for value in classifier)
    square = (weight @ products * weight).sum() + 2 * bias @ (weight @ mean) + bias.square().sum()
    return square.clamp_min(0).sqrt()
