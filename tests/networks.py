"""Small real models and data for the tests: seeded, in eval mode, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def ready(model: nn.Module, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The model in eval mode and in `dtype`, every parameter and BatchNorm buffer drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 10
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / fan_in**0.5)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                size = module.running_mean.shape
                module.running_mean.copy_(0.1 * torch.randn(size, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(size, generator=generator))
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)) and module.weight is not None:
                module.weight.add_(1)
    return model.to(dtype).eval()


def mlp(sizes: Sequence[int] = (6, 8, 7, 4), dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Linear layers with ReLU between: editable layers "0", "2", "4", ...; the last one is the head."""
    layers: list[nn.Module] = []
    for place, (features, units) in enumerate(pairwise(sizes)):
        layers += [nn.ReLU()] * (place > 0) + [nn.Linear(features, units)]
    return ready(nn.Sequential(*layers), dtype, seed)


class SmallCnn(nn.Module):
    """Two convolutions without bias, each read by a BatchNorm alone, then a classifier "fc" with a bias."""

    def __init__(self, channels: int = 3, width: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width + 1, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width + 1)
        self.fc = nn.Linear(width + 1, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(images)))
        hidden = torch.relu(self.bn2(self.conv2(hidden)))
        return self.fc(hidden.mean((2, 3)))


def cnn(
    channels: int = 3, width: int = 5, classes: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Module:
    """A CNN with BatchNorm: layers conv1, conv2, fc; takes images such as (n, 3, 6, 6)."""
    return ready(SmallCnn(channels, width, classes), dtype, seed)


# Each takes a batch of (n, 4, 6, 7) images.
CONVOLUTIONS: dict[str, Callable[[], nn.Conv2d]] = {
    "plain": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(4, 6, 1),
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2),
    "oblong": lambda: nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    "groups": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "same": lambda: nn.Conv2d(4, 6, (3, 5), dilation=(2, 1), padding="same"),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "reflect": lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"),
    "replicate": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, padding_mode="replicate"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", groups=2),
}


class OneConvolution(nn.Module):
    """A convolution "conv" between a pointwise "stem" and a classifier "fc"."""

    def __init__(self, conv: nn.Conv2d, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.conv = conv
        self.fc = nn.Linear(conv.out_channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(torch.relu(self.stem(images)))
        return self.fc(torch.relu(hidden).mean((2, 3)))


def convolution_net(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The net around CONVOLUTIONS[kind]; takes (n, 4, 6, 7) images, three classes."""
    return ready(OneConvolution(CONVOLUTIONS[kind]()), dtype, seed)


def conv1d_net(
    features: int = 6, width: int = 5, classes: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Module:
    """A net of transformers' Conv1D, whose weights are stored as (in, out), and a Linear head "2"."""
    from transformers.pytorch_utils import Conv1D

    return ready(nn.Sequential(Conv1D(width, features), nn.GELU(), nn.Linear(width, classes)), dtype, seed)


def hf_vit(dtype: torch.dtype = torch.float64, seed: int = 0, classes: int = 3) -> nn.Module:
    """A tiny transformers ViTForImageClassification; takes (n, 3, 8, 8) images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_channels=3,
        num_labels=classes,
    )
    return ready(ViTForImageClassification(config), dtype, seed)


def hf_resnet(dtype: torch.dtype = torch.float64, seed: int = 0, classes: int = 3) -> nn.Module:
    """A tiny transformers ResNetForImageClassification; takes (n, 3, 32, 32) images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3,
        embedding_size=4,
        hidden_sizes=[4, 6],
        depths=[1, 1],
        layer_type="basic",
        num_labels=classes,
    )
    return ready(ResNetForImageClassification(config), dtype, seed)


class Bottleneck(nn.Module):
    """torchvision's residual block of three convolutions."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(out))

    def forward(self, images: Tensor) -> Tensor:
        identity = images if self.downsample is None else self.downsample(images)
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        return self.relu(self.bn3(self.conv3(hidden)) + identity)


class ResNet50(nn.Module):
    """torchvision's ResNet-50 by module names and order (53 convolutions and fc), with tiny widths."""

    def __init__(self, width: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        for stage, (blocks, stride) in enumerate([(3, 1), (4, 2), (6, 2), (3, 2)], start=1):
            layer = nn.Sequential()
            for block in range(blocks):
                layer.append(Bottleneck(channels, width, 2 * width, stride if block == 0 else 1))
                channels = 2 * width
            self.add_module(f"layer{stage}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            hidden = stage(hidden)
        return self.fc(self.avgpool(hidden).flatten(1))


def resnet50_tree(width: int = 2, classes: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A cheap net with the module tree of torchvision's ResNet-50; takes (n, 3, 32, 32) images."""
    return ready(ResNet50(width, classes), dtype, seed)


def samples(
    shape: Sequence[int],
    labels: Sequence[int],
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    apart: float = 1.0,
) -> Batch:
    """One labelled input of `shape` for each entry of `labels`, around a centre of its class."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(labels), *shape, generator=generator, dtype=torch.float64)
    for label in sorted(set(labels)):
        own = torch.Generator().manual_seed(1000 + label)
        centre = torch.randn(*shape, generator=own, dtype=torch.float64)
        values[[place for place, other in enumerate(labels) if other == label]] += apart * centre
    return values.to(dtype), torch.tensor(labels)


def batched(data: Batch, sizes: int | Iterable[int]) -> list[Batch]:
    """The samples cut into batches of one size, or of the given sizes and then the rest."""
    inputs, labels = data
    cuts = [sizes] * (len(inputs) // sizes + 1) if isinstance(sizes, int) else [*sizes, len(inputs)]
    parts, start = [], 0
    for size in cuts:
        if start < len(inputs) and size:
            parts.append((inputs[start : start + size], labels[start : start + size]))
            start += size
    return parts


def split(data: Batch, forgotten: Sequence[int]) -> tuple[Batch, Batch]:
    """The samples of some classes, and the others."""
    inputs, labels = data
    is_forgotten = torch.isin(labels, torch.tensor(forgotten))
    return (inputs[is_forgotten], labels[is_forgotten]), (inputs[~is_forgotten], labels[~is_forgotten])


def request(
    shape: Sequence[int],
    forgotten: Sequence[int] = (0,),
    kept: Sequence[int] = (1, 2),
    each: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Batch, Batch]:
    """Forget and retain samples, `each` of every class, in mixed order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([*forgotten, *kept]).repeat(each)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return split(samples(shape, labels.tolist(), dtype, seed), forgotten)
