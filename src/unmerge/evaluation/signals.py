"""What an attacker reads from a model's answer: correctness, confidence, entropy and modified entropy."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 1e-30  # below which a probability counts as this, as in the public code


def correctness(probabilities: Tensor, labels: Tensor) -> Tensor:
    """1 where the likeliest class is the label, else 0."""
    return (probabilities.argmax(1) == labels).to(probabilities.dtype)


def confidence(probabilities: Tensor, labels: Tensor) -> Tensor:
    """p_y, the probability of the label."""
    return probabilities.gather(1, labels[:, None]).squeeze(1)


def entropy(probabilities: Tensor) -> Tensor:
    """−Σ p_i log p_i."""
    return -(probabilities * _log(probabilities)).sum(1)


def modified_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """−(1 − p_y) log p_y − Σ_{i≠y} p_i log(1 − p_i): small where the label is sure, large where another is."""
    own = confidence(probabilities, labels)
    # Each row's own term is left out rather than subtracted: where p_y rounds to 1 it would swallow the others.
    terms = (probabilities * _log(1 - probabilities)).scatter(1, labels[:, None], 0)
    return -(1 - own) * _log(own) - terms.sum(1)


def public_modified_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The public SVC attack's modified entropy, with its two slips.

    It swaps p for 1 − p in the columns of all labels of the set instead of in each row's own, and takes
    log p where log(1 − p) is meant.
    """
    present = torch.zeros(probabilities.shape[1], dtype=torch.bool, device=labels.device)
    present[labels] = True
    swapped = torch.where(present, 1 - probabilities, probabilities)
    logs = torch.where(probabilities > 0, probabilities.log(), probabilities.new_tensor(_SMALL).log())
    return -(swapped * logs).sum(1)


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """log p_y / (1 − p_y) from logits, finite also where p_y rounds to 0 or 1."""
    logits = logits.double()
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (own.squeeze(1) - others.logsumexp(1)).clamp(-1e5, 1e5)


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=_SMALL).log()
