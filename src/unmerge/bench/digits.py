"""scikit-learn's handwritten digits and a small convolutional network: a real task that trains in seconds.

python -m unmerge.bench.digits            # every method, every axis: results/digits.json and .md, minutes
python -m unmerge.bench.digits --forget 3 8 --seed 1
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Split:
    """Images (n, 1, 8, 8) and their labels."""

    images: Tensor
    labels: Tensor

    def without(self, *classes: int) -> Split:
        return self._where(~torch.isin(self.labels, torch.tensor(classes)))

    def only(self, *classes: int) -> Split:
        return self._where(torch.isin(self.labels, torch.tensor(classes)))

    def loader(self, batch_size: int = 128) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=batch_size)

    def _where(self, chosen: Tensor) -> Split:
        return Split(self.images[chosen], self.labels[chosen])


def load_digits(seed: int = 0) -> tuple[Split, Split]:
    """The 1,797 images, three quarters of each class for training and the rest for testing."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    parts = train_test_split(data.images, data.target, test_size=0.25, stratify=data.target, random_state=seed)
    train_images, test_images, train_labels, test_labels = parts
    train, test = (
        Split(torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(labels, dtype=torch.int64))
        for images, labels in ((train_images, train_labels), (test_images, test_labels))
    )
    return train, test


def network() -> nn.Sequential:
    """Three convolutions with BatchNorm and a linear classifier."""

    def block(channels: int, out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32, 1), *block(32, 64, 2), *block(64, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def train(split: Split, seed: int = 0, epochs: int = 20) -> nn.Sequential:
    """The network trained from scratch, in evaluation mode."""
    torch.manual_seed(seed)
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = epochs * (-(-len(split.labels) // 64))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(split.labels)).split(64):
            loss = nn.functional.cross_entropy(model(split.images[chosen]), split.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """The share of images that the model labels right."""
    return (model(split.images).argmax(1) == split.labels).float().mean().item()


def main() -> None:
    from unmerge.bench.comparison import compared
    from unmerge.bench.tasks import digit_tasks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forget", type=int, nargs="+", default=[3], help="the digits to forget (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="without trained baselines and slow axes")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for digits.json and digits.md")
    options = parser.parse_args()
    task = digit_tasks([tuple(options.forget)], options.seed, with_floor=True)[0]
    found = compared(task, fast=options.fast, seed=options.seed)
    print(found)
    found.to_json(options.out / "digits.json")
    found.to_markdown(options.out / "digits.md")


if __name__ == "__main__":
    main()
