"""How the language-model baselines train: AdamW, warm-up and linear decay, in pairs of forget and retain sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.language.sequences import Sequences, TokenBatch
from unmerge.baselines.options import check_count, check_known, check_number
from unmerge.baselines.training import Epoch, descend, set_rate, trainable
from unmerge.data.batches import device_of

Loss = Callable[[nn.Module, TokenBatch, TokenBatch, list[int]], Tensor]


@dataclass(frozen=True)
class LanguageTraining:
    """OpenUnlearning's settings: matrices alone decay, and gradients are clipped."""

    epochs: int = 10
    lr: float = 1e-5
    batch_size: int = 32
    weight_decay: float = 0.01
    warmup: float = 1.0  # epochs in which the learning rate rises; then it falls to zero
    max_norm: float = 1.0  # of all gradients together
    autocast: bool | None = None  # forward passes in bfloat16; by default on a GPU
    seed: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LanguageTraining:
        """The settings with the options that a caller gave by name."""
        check_known(options, [entry.name for entry in fields(cls)])
        return cls(**options)

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, 0)
        check_number("lr", self.lr, 0)
        check_count("batch_size", self.batch_size, 1)
        check_number("weight_decay", self.weight_decay, 0)
        check_number("warmup", self.warmup, 0)
        check_number("max_norm", self.max_norm, 0, above=True)

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """What forward passes run in."""
        half = device.type == "cuda" if self.autocast is None else self.autocast
        return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()

    def rate(self, done: int, steps: int) -> float:
        """The learning rate of the step after `done` others, of `steps` an epoch."""
        rising, total = self.warmup * steps, self.epochs * steps
        if done < rising:
            return self.lr * min(1.0, (done + 1) / rising)
        return self.lr * max(0.0, (total - done) / max(1.0, total - rising))


def train(model: nn.Module, epoch: Epoch, steps: int, training: LanguageTraining, what: str) -> nn.Module:
    """The model, trained in place with AdamW: a step on each loss that `epoch` yields, `steps` of them an epoch."""
    parameters = trainable(model, what)
    groups = [
        {"params": [entry for entry in parameters if entry.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [entry for entry in parameters if entry.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.lr, fused=device_of(model).type == "cuda")

    def step(done: int) -> None:
        nn.utils.clip_grad_norm_(parameters, training.max_norm)
        set_rate(optimizer, training.rate(done, steps))
        optimizer.step()

    return descend(model, epoch, training.epochs, optimizer, step, training.seed, what)


def unlearn(
    model: nn.Module, forget: Sequences, retain: Sequences, loss: Loss, training: LanguageTraining, what: str
) -> nn.Module:
    """A copy of the model, trained on the loss of pairs: each forget sequence once an epoch, with a random retain one.

    loss: of the copy, a forget batch, a retain batch and the places of the forget sequences.
    """
    device = device_of(model)
    with working_copy(model, training.seed) as result:

        def epoch(generator: torch.Generator) -> Iterator[Tensor]:
            for places in torch.randperm(len(forget), generator=generator).split(training.batch_size):
                kept = torch.randint(len(retain), (len(places),), generator=generator)
                chosen = places.tolist()
                with training.precision(device):
                    value = loss(result, forget.take(chosen, device), retain.take(kept.tolist(), device), chosen)
                yield value

        return train(result, epoch, -(-len(forget) // training.batch_size), training, what)
