"""Whether the initial weights are those that fine-tuning started from, or a stranger's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from unmerge.errors import InitError

FOREIGN_COSINE = 0.2  # of the fine-tuned and the initial weights, below which they have nothing to do with each other


@dataclass(frozen=True)
class Origin:
    """How a layer's fine-tuned weights lie to its initial ones."""

    cosine: float  # of the two weights: near 1 for fine-tuning, 0 for another training
    norm_ratio: float  # ‖τ‖ / ‖W‖: below 1 for fine-tuning, about √2 for a stranger of the same size
    outside_span: float | None = None  # share of ‖τ‖² outside the leading directions of the joint inputs


def origin_of(weight: Tensor, initial: Tensor, input_basis: Tensor | None = None) -> Origin:
    """Compare one layer's weights, as (..., out, in) matrices; `input_basis`: directions that its inputs span."""
    vector = weight - initial
    outside = None
    if input_basis is not None:
        inside = (vector @ input_basis.to(vector)).square().sum()
        outside = (1 - inside / vector.square().sum().clamp_min(torch.finfo(vector.dtype).tiny)).item()
    norm = weight.norm().clamp_min(torch.finfo(weight.dtype).tiny)
    return Origin(_cosine(weight, initial).item(), (vector.norm() / norm).item(), outside)


def check_origin(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Refuse initial weights that the model was not fine-tuned from: their difference is two trainings, not one.

    pairs: each weight with its initial value; biases and what began at zero say nothing.
    """
    found = [origin_of(weight, initial) for weight, initial in pairs if weight.dim() > 1 and initial.any()]
    if not found:
        return
    cosines = sorted(origin.cosine for origin in found)
    middle = cosines[len(cosines) // 2]
    if middle < FOREIGN_COSINE:
        ratios = sorted(origin.norm_ratio for origin in found)
        raise InitError(
            f"init does not look like the checkpoint that this model was fine-tuned from: the median cosine of the "
            f"two weights is {middle:.2f} (fine-tuning leaves it near 1, expected at least {FOREIGN_COSINE}), and the "
            f"difference has {ratios[len(ratios) // 2]:.2f} times the norm of the weights. An edit made with another "
            'pretraining can destroy the model. Pass the right checkpoint, or init="zero", which needs none; '
            "check_init=False overrides."
        )


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of the angle between two tensors; 0 where one of them is zero."""
    norms = first.norm() * second.norm()
    return (first * second).sum() / norms if norms > 0 else norms
