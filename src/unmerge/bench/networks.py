"""The networks of the vision benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SHAPES: dict[str, tuple[list[int], list[int], str]] = {
    "resnet18": ([64, 128, 256, 512], [2, 2, 2, 2], "basic"),
    "resnet50": ([256, 512, 1024, 2048], [3, 4, 6, 3], "bottleneck"),
}


def cifar_resnet(name: str, classes: int) -> Any:
    """transformers' ResNet with a stem for 32x32 images, untrained, in evaluation mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes, depths, kind = _SHAPES[name]
    config = ResNetConfig(hidden_sizes=sizes, depths=depths, layer_type=kind, num_labels=classes)
    model = ResNetForImageClassification(config).eval()
    model.resnet.embedder.embedder.convolution = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.resnet.embedder.pooler = nn.Identity()
    return model.to(memory_format=torch.channels_last)
