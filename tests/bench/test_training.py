"""Training on images that lie on the device: the same seed gives the same network, and it learns."""

from __future__ import annotations

import torch
from torch import nn

from unmerge.bench.digits import load_digits
from unmerge.bench.images import Images
from unmerge.bench.training import AugmentedBatches, augmented, train


def test_crops_are_windows_of_the_padded_image_and_mirrored_or_not() -> None:
    torch.manual_seed(0)
    padded = torch.arange(2 * 16 * 16).float().reshape(2, 1, 16, 16)
    crops = augmented(padded, torch.tensor([0, 1] * 20), 8)
    assert crops.shape == (40, 1, 8, 8)
    steps = crops[:, 0, 0].diff(dim=1)
    mirrored = (steps == -1).all(1)
    assert ((steps == 1).all(1) | mirrored).all()
    assert 5 < mirrored.sum() < 35
    assert (crops[:, 0].diff(dim=1) == 16).all()
    assert torch.equal(crops[:, 0, 0, 0] >= 256, torch.tensor([False, True] * 20))


def test_augmented_batches_are_the_same_each_time_and_those_of_another_seed_are_not() -> None:
    images, _ = load_digits()
    data = Images(images.images[:70], images.labels[:70])
    batches = AugmentedBatches(data, 30)
    first, again = list(batches), list(batches)
    assert [len(labels) for _, labels in first] == [30, 30, 10]
    assert len(batches) == 3
    assert torch.equal(torch.cat([labels for _, labels in first]), data.labels)
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    assert first[0][0].shape == data.images[:30].shape
    assert not torch.equal(first[0][0], data.images[:30])
    assert not torch.equal(first[0][0], next(iter(AugmentedBatches(data, 30, seed=1)))[0])


def test_the_same_seed_gives_the_same_network_and_it_learns() -> None:
    images, _ = load_digits()
    larger = nn.functional.interpolate(images.images[:400], scale_factor=4)  # shifts by four pixels are then small
    data = Images(larger, images.labels[:400])

    def trained(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
        return train(model, data, epochs=15, seed=seed, lr=0.1, batch_size=50)

    first, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first[0].weight, other[0].weight)  # type: ignore[index]
    assert (first(data.images).argmax(1) == data.labels).float().mean() > 0.5
    assert not first.training
