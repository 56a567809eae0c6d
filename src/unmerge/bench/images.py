"""Images and labels on one device, in batches: what the vision benchmarks read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Batches:
    """Tensors on one device as labelled batches, as often as they are read."""

    def __init__(self, images: Tensor, labels: Tensor, size: int) -> None:
        self.images, self.labels, self.size = images, labels, size

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.images.split(self.size), self.labels.split(self.size), strict=True)

    def part(self, start: int, stop: int | None = None) -> Batches:
        return Batches(self.images[start:stop], self.labels[start:stop], self.size)


@dataclass(frozen=True)
class Images:
    """Normalised images (n, channels, height, width) and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, classes: Iterable[int]) -> Images:
        return self.where(self.has(classes))

    def without(self, classes: Iterable[int]) -> Images:
        return self.where(~self.has(classes))

    def has(self, classes: Iterable[int]) -> Tensor:
        return torch.isin(self.labels, torch.tensor(list(classes), device=self.labels.device))

    def where(self, chosen: Tensor) -> Images:
        return Images(self.images[chosen], self.labels[chosen])

    def batches(self, size: int = 1000) -> Batches:
        return Batches(self.images, self.labels, size)

    def to(self, device: torch.device | str) -> Images:
        images = self.images.to(device, memory_format=torch.channels_last)
        return Images(images, self.labels.to(device))


def half_precision(model: nn.Module, batch: Any) -> Any:
    """The model's output in bf16 autocast, for benchmarks on CUDA."""
    with torch.autocast("cuda", torch.bfloat16):
        return model(batch[0])
