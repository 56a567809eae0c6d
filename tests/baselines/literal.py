"""A two-layer network and SGD written out, against which the baselines are checked step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]


def weights_of(model: nn.Module) -> Weights:
    """Copies of the parameters of `networks.mlp`: "0.weight", "0.bias", "2.weight", "2.bias"."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def logits(weights: Weights, inputs: Tensor) -> Tensor:
    hidden = (inputs @ weights["0.weight"].T + weights["0.bias"]).clamp(min=0)
    return hidden @ weights["2.weight"].T + weights["2.bias"]


def cross_entropy(weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
    found = logits(weights, inputs)
    right = found[torch.arange(len(labels)), labels]
    return (found.exp().sum(1).log() - right).mean()


def gradients(weights: Weights, loss: Callable[[Weights], Tensor]) -> Weights:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


def descend(
    weights: Weights,
    losses: list[Callable[[Weights], Tensor]],
    rates: list[float],
    momentum: float,
    decay: float,
    frozen: Weights | None = None,
) -> Weights:
    """SGD with momentum and weight decay, a step on each loss; where `frozen` is true a weight does not move."""
    velocity = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    start = weights
    for loss, rate in zip(losses, rates, strict=True):
        found = gradients(weights, loss)
        velocity = {name: momentum * velocity[name] + found[name] + decay * weights[name] for name in weights}
        weights = {name: weights[name] - rate * velocity[name] for name in weights}
        if frozen is not None:
            weights = {name: torch.where(frozen[name], start[name], weights[name]) for name in weights}
    return weights


def agree(model: nn.Module, weights: Weights, tolerance: float = 1e-12) -> bool:
    found = dict(model.named_parameters())
    return all(torch.allclose(found[name], weights[name], rtol=tolerance, atol=tolerance) for name in weights)
