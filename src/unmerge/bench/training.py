"""Training a classifier on images that lie on the device, with the usual crops and flips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from unmerge.bench.images import Images
from unmerge.data.batches import logits_of

_PADDING = 4


@dataclass(frozen=True)
class Schedule:
    """How the networks of a benchmark are trained."""

    epochs: int
    lr: float
    batch_size: int
    schedule: str


SCHEDULES = {  # by initial weights, and whether fast or as the paper has it
    ("zero", False): Schedule(100, 0.1, 128, "cosine"),
    ("pretrained", False): Schedule(50, 0.01, 128, "cosine"),
    ("zero", True): Schedule(30, 0.1, 256, "one-cycle"),
    ("pretrained", True): Schedule(15, 0.02, 256, "one-cycle"),
}


def train(
    model: nn.Module,
    data: Images,
    epochs: int,
    seed: int = 0,
    *,
    lr: float = 0.2,
    batch_size: int = 256,
    weight_decay: float = 5e-4,
    schedule: str = "one-cycle",
    what: str = "training",
) -> nn.Module:
    """The model itself, trained in place with SGD; in evaluation mode.

    schedule: "one-cycle" for few epochs, or the paper's "cosine".
    """
    device = data.images.device
    torch.manual_seed(seed)
    on_gpu = device.type == "cuda"
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": weight_decay, "nesterov": True, "fused": on_gpu}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **settings)
    batch_size = min(batch_size, len(data))
    batches = len(data) // batch_size
    rates: torch.optim.lr_scheduler.LRScheduler
    if schedule == "cosine":
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    else:
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * batches, pct_start=0.2)
    padded = nn.functional.pad(data.images, (_PADDING,) * 4)
    model.train()
    logits_of_batch: Callable[..., Any] = _Logits(model)
    if on_gpu:
        some = augmented(padded, torch.arange(batch_size, device=device) % len(data), data.images.shape[-1])
        # A step of small kernels is bound by their launches, which a recorded graph makes in one.
        logits_of_batch = torch.cuda.make_graphed_callables(logits_of_batch, (some,))
    progress = tqdm(total=epochs * batches, desc=what, unit="batch", disable=None, leave=False)
    for _ in range(epochs):
        order = torch.randperm(len(data), device=device)
        for chosen in order[: batches * batch_size].split(batch_size):
            images = augmented(padded, chosen, data.images.shape[-1])
            loss = nn.functional.cross_entropy(logits_of_batch(images), data.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            progress.update()
    progress.close()
    return model.eval()


class _Logits(nn.Module):
    """The model's logits in float32, computed in bfloat16 on a GPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        # Without a cache, since a recorded graph must cast the weights as they are at each replay.
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda, cache_enabled=False):
            logits = logits_of(self.model(images))
        assert logits is not None
        return logits.float()


def augmented(padded: Tensor, chosen: Tensor, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Random crops of padded images, each mirrored half of the time."""
    device, count = padded.device, len(chosen)
    draws: dict[str, Any] = {"device": device, "generator": generator}
    top, left = torch.randint(0, 2 * _PADDING + 1, (2, count, 1), **draws)
    pixels = torch.arange(size, device=device)
    columns = torch.where(torch.rand(count, 1, **draws) < 0.5, pixels, pixels.flip(0))
    crops = padded[chosen[:, None, None], :, (top + pixels)[:, :, None], (left + columns)[:, None, :]]
    return crops.permute(0, 3, 1, 2)  # which is channels-last in memory


class AugmentedBatches:
    """Labelled batches of images cropped and mirrored as in training, the same ones each time they are read."""

    def __init__(self, data: Images, size: int, seed: int = 0) -> None:
        self.data, self.size, self.seed = data, size, seed

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(self.data.images.device).manual_seed(self.seed)
        for images, labels in self.data.batches(self.size):
            every = torch.arange(len(labels), device=labels.device)
            padded = nn.functional.pad(images, (_PADDING,) * 4)
            yield augmented(padded, every, images.shape[-1], generator), labels
