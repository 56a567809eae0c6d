"""SalUn (Fan et al., 2024): random label on those weights alone that matter to the forget samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.options import check_number
from unmerge.baselines.relabelling import relabel
from unmerge.baselines.samples import Data, Samples, gather
from unmerge.baselines.training import Training, predict
from unmerge.model.evaluating import evaluating


def salun(
    model: nn.Module,
    forget: Data,
    retain: Data,
    *,
    fraction: float = 0.5,
    epochs: int = 10,
    lr: float = 0.01,
    **options: Any,
) -> nn.Module:
    """A copy of the model trained by random label, all but the most salient weights bit-identical to before.

    fraction: the share of all weights that may change.
    options: the other fields of `Training`.
    """
    training = Training.of(options, epochs=epochs, lr=lr)
    check_number("fraction", fraction, 0, 1, above=True)
    with working_copy(model, training.seed) as result:
        samples = gather(result, forget, retain, forward=training.forward, hold=training.hold)
        masks = saliency_masks(result, samples, fraction, training)
        weights = dict(result.named_parameters())
        frozen = [(weights[name], mask, weights[name].detach().clone()) for name, mask in masks.items()]

        @torch.no_grad()
        def restore() -> None:
            # After the step, not in the gradient: weight decay and momentum would move these weights without one.
            for weight, mask, before in frozen:
                weight.copy_(torch.where(mask, weight, before))

        return relabel(result, samples, training, "SalUn", restore)


def saliency_masks(model: nn.Module, samples: Samples, fraction: float, training: Training) -> dict[str, Tensor]:
    """Which entries of each trainable parameter are among the top fraction of |Σ over batches of ∇CE(forget)|.

    One ranking over all parameters, in evaluation mode and without augmentation; exactly the rounded share is chosen,
    earlier entries first among equals.
    """
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    sums = {name: torch.zeros_like(weight) for name, weight in parameters.items()}
    with evaluating(model), torch.enable_grad():
        for chosen in samples.batches(samples.forget, training.batch_size):
            batch, labels = samples.take(chosen)
            loss = -nn.functional.cross_entropy(predict(model, batch, training.forward, training.autocast), labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    total += gradient
    saliency = torch.cat([total.abs().flatten() for total in sums.values()])
    salient = torch.zeros_like(saliency, dtype=torch.bool)
    salient[saliency.argsort(descending=True, stable=True)[: round(fraction * len(saliency))]] = True
    parts = salient.split([total.numel() for total in sums.values()])
    return {name: part.reshape(total.shape) for part, (name, total) in zip(parts, sums.items(), strict=True)}
