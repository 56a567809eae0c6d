"""Evaluation mode, and the BatchNorms, which are what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm that keeps running statistics."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
