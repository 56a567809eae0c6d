"""Re-estimating the running statistics of the BatchNorms that lie behind an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unmerge.data.batches import Forward, feed, first_tensor, on_device
from unmerge.data.reading import Reading
from unmerge.distributed.processes import add_up_, size, summed
from unmerge.errors import DataError
from unmerge.model.evaluating import batch_norms, evaluating

RECALIBRATION_SAMPLES = 10_000


def norm_inputs(model: nn.Module, batch: Any, forward: Forward | None) -> dict[str, Tensor]:
    """What each BatchNorm receives for a batch: the comparison before and after an edit shows which lie behind it."""
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = next(iter([*args, *kwargs.values()])).detach().clone()

        return see

    hooks = [
        module.register_forward_pre_hook(look(name), with_kwargs=True) for name, module in batch_norms(model).items()
    ]
    try:
        with evaluating(model):
            feed(model, on_device(model, batch), forward)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def norms_behind(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """The BatchNorms whose input an edit has changed."""
    return [name for name in after if name in before and not torch.equal(before[name], after[name])]


def recalibrate(model: nn.Module, norms: Sequence[str], data: Iterable[Any], forward: Forward | None) -> int:
    """Re-estimate the running statistics of some BatchNorms by a cumulative average; returns the samples read."""
    chosen = [batch_norms(model)[name] for name in norms]
    momenta = [norm.momentum for norm in chosen]
    samples = 0

    def uncounted(model: nn.Module, batch: Any) -> None:
        """What a process with no batch left feeds a model in parts, so that the others can go on."""
        with evaluating(model):
            for norm in chosen:
                if isinstance(norm, nn.SyncBatchNorm):
                    norm.train()  # in which the others wait for it
            feed(model, batch, forward)

    reading = Reading(model, data, "recalibrate", uncounted, samples=RECALIBRATION_SAMPLES)
    is_synchronised = any(isinstance(norm, nn.SyncBatchNorm) for norm in chosen)
    with evaluating(model):
        # One sample that is left over of the data would weigh as much as a batch, and may have no variance. Batches of
        # one alone count, and so do those of which other processes hold the rest.
        leaves_out_singles = len(first_tensor(reading.few)) > 1 and not is_synchronised
        try:
            for norm in chosen:
                norm.reset_running_stats()
                norm.momentum = None
                norm.train()
            for piece in reading:
                count = len(first_tensor(piece.batch))
                if count == 1 and leaves_out_singles:
                    uncounted(model, on_device(model, piece.batch))
                    continue
                _feed(model, piece.batch, forward, count)
                samples += count
            _average(chosen)
        finally:
            for norm, momentum in zip(chosen, momenta, strict=True):
                norm.momentum = momentum
    for name in norms:
        if not model.get_buffer(f"{name}.running_var").isfinite().all():
            raise DataError(f"recalibration left {name!r} without finite statistics; look at the batches.")
    return summed(samples)[0]


def _feed(model: nn.Module, batch: Any, forward: Forward | None, count: int) -> None:
    try:
        feed(model, on_device(model, batch), forward)
    except DataError as error:
        if count > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise DataError(
            "recalibrate= gave a batch of one sample, in which a BatchNorm behind the edit sees one value a channel, "
            "and no variance. Pass larger batches."
        ) from error


def _average(norms: Sequence[_BatchNorm]) -> None:
    """Running statistics over the batches of all processes in place of those over this one's."""
    if size() == 1:
        return
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        count = norm.num_batches_tracked.double()
        total = add_up_(count.clone())
        for average in (norm.running_mean, norm.running_var):
            average.copy_(add_up_(average.double() * count) / total)
        norm.num_batches_tracked.copy_(total)
