"""The training loop that the gradient baselines share: SGD on the losses of an epoch, under a named schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from unmerge.baselines.options import BaselineError, check_count, check_known, check_name, check_number
from unmerge.baselines.samples import Augment, Samples, chunks
from unmerge.data.batches import Forward, classifier_logits, device_of, feed
from unmerge.errors import listing
from unmerge.placement.state import state_of

# The factor of the learning rate after a share of all steps. The paper trains with "cosine"; the public code of
# SalUn divides by ten after 91 and 136 of 182 epochs ("steps"), so that it unlearns for 10 epochs at a "constant" rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "steps": lambda share: 0.1 ** ((share >= 0.5) + (share >= 0.75)),
}

Epoch = Callable[[torch.Generator], Iterable[Tensor]]


@dataclass(frozen=True)
class Training:
    """How a baseline trains: SGD with the paper's batch size, momentum and weight decay."""

    epochs: int
    lr: float
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "constant"  # or "cosine", "steps"
    autocast: bool = False  # forward passes in bfloat16
    augment: Augment | None = None  # inputs of a training batch -> inputs; a mapping's without its labels
    hold: str = "device"  # where all samples are kept: the model's "device", or "cpu"
    forward: Forward | None = None
    seed: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any], **settings: Any) -> Training:
        """Settings with the options that a caller gave by name."""
        check_known(options, [entry.name for entry in fields(cls)])
        return cls(**{**settings, **options})

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, 0)
        check_number("lr", self.lr, 0)
        check_count("batch_size", self.batch_size, 1)
        check_number("momentum", self.momentum, 0, 1)
        check_number("weight_decay", self.weight_decay, 0)
        check_name("schedule", self.schedule, SCHEDULES)


def train(
    model: nn.Module,
    epoch: Epoch,
    steps: int,
    training: Training,
    what: str,
    after_step: Callable[[], None] | None = None,
) -> nn.Module:
    """The model, trained in place: a step on each loss that `epoch` yields, `steps` of them an epoch."""
    optimizer = torch.optim.SGD(
        trainable(model, what), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    factor = SCHEDULES[training.schedule]
    total = steps * training.epochs

    def step(done: int) -> None:
        set_rate(optimizer, training.lr * factor(done / total))
        optimizer.step()
        if after_step is not None:
            after_step()

    return descend(model, epoch, training.epochs, optimizer, step, training.seed, what)


def descend(
    model: nn.Module,
    epoch: Epoch,
    epochs: int,
    optimizer: torch.optim.Optimizer,
    step: Callable[[int], None],
    seed: int,
    what: str,
) -> nn.Module:
    """The model in place: the gradients of each loss that `epoch` yields, then `step` with the number of those before.

    Training flags and gradients are as before afterwards; weights that overflowed are an error.
    """
    generator = torch.Generator().manual_seed(seed)
    flags = {module: module.training for module in model.modules()}
    done = 0
    model.train()
    for _ in tqdm(range(epochs), desc=what, unit="epoch", disable=None, leave=False):
        for loss in epoch(generator):
            optimizer.zero_grad()
            loss.backward()
            step(done)
            done += 1
    for module, flag in flags.items():
        module.training = flag
    model.zero_grad(set_to_none=True)
    check_finite(model, what)
    return model


def trainable(model: nn.Module, what: str) -> list[nn.Parameter]:
    """The parameters that take a gradient, at least one."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise BaselineError(f"{what}: no parameter of the model takes a gradient. Call model.requires_grad_(True).")
    return parameters


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def train_on(model: nn.Module, samples: Samples, places: Tensor, training: Training, what: str) -> nn.Module:
    """The model, trained in place on some samples with their labels."""

    def epoch(generator: torch.Generator) -> Iterable[Tensor]:
        for chosen in samples.shuffled(places, training.batch_size, generator):
            yield loss_of(model, samples, chosen, training)

    return train(model, epoch, len(chunks(places, training.batch_size)), training, what)


def loss_of(model: nn.Module, samples: Samples, chosen: Tensor, training: Training) -> Tensor:
    """The mean cross-entropy of the chosen samples."""
    batch, labels = samples.take(chosen, training.augment)
    return nn.functional.cross_entropy(predict(model, batch, training.forward, training.autocast), labels)


def predict(model: nn.Module, batch: Any, forward: Forward | None, autocast: bool = False) -> Tensor:
    """The model's logits for a batch, in float32 or wider."""
    with torch.autocast(device_of(model).type, torch.bfloat16) if autocast else nullcontext():
        logits = classifier_logits(feed(model, batch, forward))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_finite(model: nn.Module, what: str) -> None:
    """Refuse weights that have overflowed."""
    state = {name: tensor for name, tensor in state_of(model).items() if tensor.is_floating_point()}
    whole = torch.stack([tensor.detach().isfinite().all() for tensor in state.values()]).tolist()
    broken = [name for name, finite in zip(state, whole, strict=True) if not finite]
    if broken:
        raise BaselineError(f"{what} diverged: {listing(broken)} are not finite. Lower lr=, epochs= or alpha=.")
