"""Where an affine shift goes (a bias or the next BatchNorm's mean), and re-estimating BatchNorm statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from unmerge.data.batches import Forward, feed, first_tensor, on_device
from unmerge.data.reading import Reading
from unmerge.distributed.processes import add_up_, size, summed
from unmerge.errors import DataError

RECALIBRATION_SAMPLES = 10_000


class Consumers(TorchDispatchMode):
    """Records, while active, which operations read the outputs that are given to `watch`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._means = {
            id(module.running_mean): name
            for name, module in batch_norms(model).items()
            if module.running_mean is not None
        }
        self._watched: dict[int, tuple[str, Tensor]] = {}  # the tensor is kept, so that its id stays its own
        self._readers: dict[str, list[str | None]] = defaultdict(list)
        self._norm_calls: dict[str, int] = defaultdict(int)
        self._paused = False

    def watch(self, layer: str, output: Tensor) -> None:
        self._watched[id(output)] = (layer, output)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def sole_norm(self, layer: str) -> str | None:
        """The BatchNorm that alone reads this layer's output and reads nothing else, if there is one."""
        readers = self._readers[layer]
        if len(readers) != 1 or readers[0] is None or self._norm_calls[readers[0]] != 1:
            return None
        return readers[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused:
            given = [*args, *(kwargs or {}).values()]
            listed = [value for group in given if isinstance(group, (list, tuple)) for value in group]
            tensors = [value for value in (*given, *listed) if isinstance(value, Tensor)]
            norm = next((self._means[id(tensor)] for tensor in tensors if id(tensor) in self._means), None)
            if norm is not None:
                self._norm_calls[norm] += 1
            for tensor in tensors:
                if id(tensor) in self._watched:
                    self._readers[self._watched[id(tensor)][0]].append(norm)
        return func(*args, **(kwargs or {}))


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm that keeps running statistics."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def norm_inputs(model: nn.Module, batch: Any, forward: Forward | None) -> dict[str, Tensor]:
    """What each BatchNorm receives for a batch: the comparison before and after an edit shows which lie behind it."""
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach().clone()}))
        for name, module in batch_norms(model).items()
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
    with evaluating(model):
        try:
            for norm in chosen:
                norm.reset_running_stats()
                norm.momentum = None
                norm.train()
            for piece in reading:
                feed(model, on_device(model, piece.batch), forward)
                samples += len(first_tensor(piece.batch))
            _average(chosen)
        finally:
            for norm, momentum in zip(chosen, momenta, strict=True):
                norm.momentum = momentum
    for name in norms:
        if not model.get_buffer(f"{name}.running_var").isfinite().all():
            raise DataError(f"recalibration left {name!r} without finite statistics; look at the batches.")
    return summed(samples)[0]


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training flags and random state are as before afterwards."""
    flags = {module: module.training for module in model.modules()}
    own = (tensor for module in flags for tensor in module._parameters.values() if tensor is not None)
    devices = sorted({tensor.device.index for tensor in own if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.no_grad():
        try:
            if any(flags.values()):
                model.eval()
            yield
        finally:
            for module, training in flags.items():
                if module.training != training:
                    module.training = training
