"""BatchNorms behind an edit: their running statistics move as those of the data do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.batches import Forward
from unmerge.ledger import write
from unmerge.normalization import batch_norms, recalibrate

Running = dict[str, tuple[Tensor, Tensor]]  # mean and variance of each BatchNorm


def follow(
    model: nn.Module,
    norms: Sequence[str],
    without: Mapping[str, Tensor],
    edited: Mapping[str, Tensor],
    data: Iterable[Any],
    forward: Forward | None,
) -> None:
    """Leave the model edited, and the running statistics of some BatchNorms moved as far as the edit moves the data's.

    Training estimated them on other inputs, such as augmented images: those of the data in their place would change the
    network where the edit does not. without, edited: the tensors that it changes, by name.
    """
    write(model, without)
    usual = _running(model, norms)
    found: list[Running] = []
    for values in (without, edited):
        write(model, values)
        recalibrate(model, norms, data, forward)
        found.append(_running(model, norms))
    before, after = found
    with torch.no_grad():
        for name in norms:
            (mean, variance), (old_mean, old_variance), (new_mean, new_variance) = (
                usual[name],
                before[name],
                after[name],
            )
            has_varied = old_variance > 0
            ratio = torch.where(has_varied, new_variance, 1) / torch.where(has_varied, old_variance, 1)
            model.get_buffer(f"{name}.running_mean").copy_(mean + (new_mean - old_mean))
            model.get_buffer(f"{name}.running_var").copy_(torch.where(has_varied, variance * ratio, new_variance))


def _running(model: nn.Module, norms: Sequence[str]) -> Running:
    """Copies of what the BatchNorms hold, in float64."""
    found: Running = {}
    for name in norms:
        norm: Any = batch_norms(model)[name]
        mean, variance = norm.running_mean, norm.running_var
        found[name] = (mean.to(torch.float64, copy=True), variance.to(torch.float64, copy=True))
    return found
