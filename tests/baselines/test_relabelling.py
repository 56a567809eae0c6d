"""Random label trains on everything, forget labels drawn anew each epoch."""

from __future__ import annotations

import literal
import torch

from networks import mlp, request
from unmerge.baselines import random_label

forget, retain = request((5,), each=6)


def test_two_epochs_equal_the_formula():
    model = mlp((5, 7, 3))
    found = random_label(model, [forget], [retain], epochs=2, lr=0.1, momentum=0.9, weight_decay=0.01, seed=5)

    generator = torch.Generator().manual_seed(5)
    inputs = torch.cat([forget[0], retain[0]])
    losses = []
    for _ in range(2):
        drawn = torch.randint(3, (6,), generator=generator)
        torch.randperm(18, generator=generator)  # the order, which one batch does not show
        labels = torch.cat([drawn, retain[1]])
        losses.append(lambda weights, labels=labels: literal.cross_entropy(weights, inputs, labels))
    assert literal.agree(found, literal.descend(literal.weights_of(model), losses, [0.1] * 2, 0.9, 0.01))


def test_every_epoch_reads_each_sample_once_and_mixes_the_pools():
    seen = []

    def forward(model, batch):
        if model.training:
            seen.append(batch[1])
        return model(batch[0])

    random_label(mlp((5, 7, 3)), [forget], [retain], epochs=1, batch_size=9, forward=forward)
    assert [len(labels) for labels in seen] == [9, 9]
    assert all(0 < (labels == 0).sum() < 6 for labels in seen)
    assert torch.cat(seen).sort().values.equal(torch.cat([forget[1], retain[1]]).sort().values)
