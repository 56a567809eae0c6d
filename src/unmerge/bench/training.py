"""Training a classifier on images that lie on the device, with the usual crops and flips."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from unmerge.batches import logits_of
from unmerge.bench.images import Images

_PADDING = 4


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
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay, nesterov=True)
    batches = max(1, len(data) // batch_size)
    rates: torch.optim.lr_scheduler.LRScheduler
    if schedule == "cosine":
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    else:
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * batches, pct_start=0.2)
    padded = nn.functional.pad(data.images, (_PADDING,) * 4)
    half = device.type == "cuda"
    model.train()
    progress = tqdm(total=epochs * batches, desc=what, unit="batch", disable=None, leave=False)
    for _ in range(epochs):
        order = torch.randperm(len(data), device=device)
        for chosen in order[: batches * batch_size].split(batch_size):
            images = augmented(padded, chosen, data.images.shape[-1])
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                logits = logits_of(model(images))
                assert logits is not None
                loss = nn.functional.cross_entropy(logits, data.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            progress.update()
    progress.close()
    return model.eval()


def augmented(padded: Tensor, chosen: Tensor, size: int) -> Tensor:
    """Random crops of padded images, each mirrored half of the time."""
    device, count = padded.device, len(chosen)
    top, left = torch.randint(0, 2 * _PADDING + 1, (2, count, 1), device=device)
    pixels = torch.arange(size, device=device)
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, pixels, pixels.flip(0))
    crops = padded[chosen[:, None, None], :, (top + pixels)[:, :, None], (left + columns)[:, None, :]]
    return crops.permute(0, 3, 1, 2)  # which is channels-last in memory
