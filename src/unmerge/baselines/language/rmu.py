"""RMU (Li et al., 2024): steer one layer's forget activations to a random vector, hold its retain activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.language.sequences import TokenBatch, read_sequences
from unmerge.baselines.language.training import LanguageTraining, unlearn
from unmerge.baselines.options import BaselineError, check_count, check_number
from unmerge.model.evaluating import evaluating
from unmerge.model.shorthands import blocks_of
from unmerge.tokens import IGNORED


def rmu(
    model: nn.Module,
    forget: Iterable[Any],
    retain: Iterable[Any],
    *,
    layer: int = 7,
    steering: float = 2.0,
    **options: Any,
) -> nn.Module:
    """A copy whose decoder layer `layer` answers forget tokens with one random direction of length `steering`.

    Mean squared errors at the labelled tokens: to that vector on forget, to the given model's activations on retain.
    options: fields of `LanguageTraining`.
    """
    check_count("layer", layer, 0)
    check_number("steering", steering, 0)
    training = LanguageTraining.of(options)
    blocks = len(blocks_of(model))
    if layer >= blocks:
        raise BaselineError(f"layer={layer} does not exist: the model has {blocks} decoder layers, numbered from 0.")
    control: Tensor | None = None

    def loss(changed: nn.Module, lost: TokenBatch, kept: TokenBatch, places: list[int]) -> Tensor:
        nonlocal control
        found = activations(changed, lost, layer)
        if control is None:
            control = _control_vector(found, steering, training.seed)
        with evaluating(model):
            before = activations(model, kept, layer)
        return _masked_error(found, control, lost) + _masked_error(activations(changed, kept, layer), before, kept)

    pools = read_sequences(forget, "forget"), read_sequences(retain, "retain")
    return unlearn(model, *pools, loss, training, "RMU")


def activations(model: nn.Module, batch: TokenBatch, layer: int) -> Tensor:
    """What a decoder layer returns for a batch."""
    found: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handle = list(blocks_of(model).values())[layer].register_forward_hook(keep)
    try:
        # The trunk alone: no logit is needed.
        getattr(model, "base_model", model)(**batch.inputs)
    finally:
        handle.remove()
    return found[0].to(torch.promote_types(found[0].dtype, torch.float32))


def _control_vector(like: Tensor, length: float, seed: int) -> Tensor:
    direction = torch.rand(like.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (length * direction / direction.norm()).to(like)


def _masked_error(found: Tensor, target: Tensor, batch: TokenBatch) -> Tensor:
    """The mean over sequences of the mean squared error at their labelled tokens."""
    mask = (batch.labels != IGNORED).to(found.dtype)
    errors = (found - target).square().mean(-1)
    return ((errors * mask).sum(1) / mask.sum(1)).mean()
