"""A copy of the model to work on, so that the given one stays as it is; and the control that is nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn


def unedited(
    model: nn.Module, forget: Any = None, retain: Any = None, *, forward: Any = None, seed: int = 0
) -> nn.Module:
    """A copy of the model: the control that forgets nothing. The data and the options are not used."""
    with working_copy(model) as result:
        return result


@contextmanager
def working_copy(model: nn.Module, seed: int = 0) -> Iterator[nn.Module]:
    """A copy of the model, without gradients of its own; inside, random numbers follow the seed.

    Gradients can be taken inside, also where the caller has switched them off; random state is then as before.
    """
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        # Not torch.manual_seed, which also reseeds devices whose state is not kept.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        result = deepcopy(model)
        result.zero_grad(set_to_none=True)
        yield result
