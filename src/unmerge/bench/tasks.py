"""A task: a trained model, the model retrained without what is to be forgotten, and the data of the request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.bench import cifar_data, digits
from unmerge.bench.images import Images, half_precision
from unmerge.bench.networks import cifar_resnet
from unmerge.bench.training import AugmentedBatches, train
from unmerge.data.batches import Forward
from unmerge.model.initial import Init

BATCH = 1000


@dataclass(frozen=True)
class Task:
    """What a benchmark needs to know of one request."""

    name: str
    model: nn.Module
    retrained: nn.Module | Mapping[str, float]  # the model, or its accuracies where only its answers are kept
    forget: Iterable[Any]
    retain: Iterable[Any]
    test: Iterable[Any]
    classes: tuple[int, ...]  # that are forgotten; empty for samples that are no whole classes
    forward: Forward | None = None
    init: Init = "zero"
    floor: nn.Module | None = None  # retrained with another seed: the noise of every figure
    training: Iterable[Any] | None = None  # the retained samples as training saw them, where that differs

    @property
    def recalibration(self) -> Iterable[Any]:
        """What running statistics of BatchNorms are estimated on, so that they are those that training would leave."""
        return self.retain if self.training is None else self.training

    @property
    def splits(self) -> dict[str, Iterable[Any]]:
        return {"forget": self.forget, "retain": self.retain, "test": self.test}


def digit_tasks(
    requests: Iterable[tuple[int, ...]] = ((3,), (3, 8)), seed: int = 0, with_floor: bool = False
) -> list[Task]:
    """Forget one digit and two; training takes seconds."""
    images, test = digits.load_digits(seed)
    model = digits.train(images, seed)
    return [
        Task(
            "digits " + "+".join(map(str, classes)),
            model,
            digits.train(images.without(*classes), seed + 1),
            images.only(*classes).loader(),
            images.without(*classes).loader(),
            test.loader(),
            tuple(classes),
            floor=digits.train(images.without(*classes), seed + 2) if with_floor else None,
        )
        for classes in requests
    ]


def random_digits(samples: int, seed: int = 0) -> Task:
    """Forget samples drawn at random: no request that an edit can serve."""
    images, test = digits.load_digits(seed)
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(seed))
    forget, retain = (digits.Split(images.images[part], images.labels[part]) for part in order.tensor_split([samples]))
    model, retrained = digits.train(images, seed), digits.train(retain, seed + 1)
    return Task(f"digits random {samples}", model, retrained, forget.loader(), retain.loader(), test.loader(), ())


def task_of(
    name: str,
    data: cifar_data.Cifar100,
    model: nn.Module,
    retrained: nn.Module | Mapping[str, float],
    forgotten: Tensor,
    classes: tuple[int, ...],
) -> Task:
    """The task of forgetting some training images."""
    forget, retain = data.train.where(forgotten), data.train.where(~forgotten)
    # In random order, since what reads only the first batches must see all classes.
    order = torch.randperm(len(retain), generator=torch.Generator().manual_seed(0)).to(retain.labels.device)
    forward = half_precision if data.train.images.device.type == "cuda" else None
    retain = retain.where(order)
    parts = (forget.batches(BATCH), retain.batches(BATCH), data.test.batches(BATCH))
    return Task(name, model, retrained, *parts, classes, forward, training=AugmentedBatches(retain, BATCH))


def cifar_classifier(data: Images, network: str, classes: int, epochs: int, seed: int, what: str) -> nn.Module:
    """A ResNet trained from scratch, on the device of the data."""
    torch.manual_seed(seed)
    model: nn.Module = cifar_resnet(network, classes).to(data.images.device)
    return train(model, data, epochs, seed, what=what)
