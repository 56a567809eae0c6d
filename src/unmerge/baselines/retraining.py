"""Retraining on retain: the reference that never saw the forget samples."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.samples import Data, gather
from unmerge.baselines.training import Training, train_on
from unmerge.data.batches import device_of
from unmerge.errors import InitError, listing


def retrain(
    model: nn.Module,
    forget: Any,
    retain: Data,
    *,
    init: nn.Module | Mapping[str, Tensor] | None = None,
    epochs: int = 100,
    lr: float = 0.1,
    schedule: str = "cosine",
    **options: Any,
) -> nn.Module:
    """A model of the same kind trained on retain from fresh weights; forget is not read.

    The paper's settings for training from scratch; from pretrained weights it takes epochs=50, lr=0.01. Give what
    the model itself was trained with: a reference has the schedule of what it is compared with.
    init: where to start, as a module or a state dict; by default every module is initialised anew.
    options: the other fields of `Training`.
    """
    training = Training.of(options, epochs=epochs, lr=lr, schedule=schedule)
    with working_copy(model, training.seed) as result:
        if isinstance(init, nn.Module):
            result = deepcopy(init).to(device_of(model)).train(model.training)
        elif init is None:
            reinitialise(result)
        elif isinstance(init, Mapping):
            _load(result, init)
        else:
            raise InitError(f"init is a {type(init).__name__}; expected a module, a state dict or None.")
        # Weights that fine-tuning had frozen are fresh now, so they are trained too.
        result.requires_grad_(True)
        samples = gather(result, retain=retain, forward=training.forward, hold=training.hold)
        return train_on(result, samples, samples.retain, training, "retrain")


def reinitialise(model: nn.Module) -> None:
    """Give every module the weights that it would be made with, in place."""
    fresh: set[int] = set()
    # Inner modules first: an outer one may set some of their weights differently.
    for module in reversed(list(model.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            fresh.update(id(parameter) for parameter in module.parameters(recurse=False))
    stale = [name for name, parameter in model.named_parameters() if id(parameter) not in fresh]
    if stale:
        raise InitError(
            f"{listing(stale)} have no reset_parameters() to initialise them. Pass init=, a module that was just made."
        )


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InitError(f"init does not fit the model: {error}") from error
