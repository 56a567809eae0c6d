"""SalUn moves the salient weights as random label does, and no other by a single bit."""

from __future__ import annotations

import literal
import pytest
import torch

from networks import cnn, mlp, request
from unmerge.baselines import BaselineError, salun
from unmerge.baselines.saliency import saliency_masks
from unmerge.baselines.samples import gather
from unmerge.baselines.training import Training

forget, retain = request((5,), each=6)


def literal_masks(model, batches, fraction):
    """The top entries of the summed gradients, by sorting one long list."""
    weights = literal.weights_of(model)
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for batch in batches:
        found = literal.gradients(weights, lambda leaves, batch=batch: -literal.cross_entropy(leaves, *batch))
        sums = {name: sums[name] + found[name] for name in sums}
    ranked = sorted(
        ((-abs(value), name, place) for name, total in sums.items() for place, value in enumerate(total.flatten())),
        key=lambda entry: entry[0].item(),
    )
    masks = {name: torch.zeros(total.numel(), dtype=torch.bool) for name, total in sums.items()}
    for _, name, place in ranked[: round(fraction * len(ranked))]:
        masks[name][place] = True
    return {name: mask.reshape(weights[name].shape) for name, mask in masks.items()}


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_the_mask_is_the_top_share_of_summed_gradients(fraction):
    model = mlp((5, 7, 3))
    training = Training(epochs=1, lr=0.1, batch_size=4)
    found = saliency_masks(model, gather(model, [forget], [retain]), fraction, training)
    parts = [(forget[0][:4], forget[1][:4]), (forget[0][4:], forget[1][4:])]
    expected = literal_masks(model, parts, fraction)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_two_epochs_equal_random_label_on_the_salient_weights():
    model = mlp((5, 7, 3))
    found = salun(model, [forget], [retain], epochs=2, lr=0.1, momentum=0.9, weight_decay=0.01, seed=5)

    generator = torch.Generator().manual_seed(5)
    inputs = torch.cat([forget[0], retain[0]])
    losses = []
    for _ in range(2):
        labels = torch.cat([torch.randint(3, (6,), generator=generator), retain[1]])
        torch.randperm(18, generator=generator)
        losses.append(lambda weights, labels=labels: literal.cross_entropy(weights, inputs, labels))
    frozen = {name: ~mask for name, mask in literal_masks(model, [forget], 0.5).items()}
    expected = literal.descend(literal.weights_of(model), losses, [0.1] * 2, 0.9, 0.01, frozen)
    assert literal.agree(found, expected)


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_masked_weights_are_bit_identical_and_the_others_move(fraction):
    model = cnn(dtype=torch.float32)
    pools = request((3, 6, 6), each=6, dtype=torch.float32)
    options = {"epochs": 3, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "batch_size": 5}
    found = salun(model, [pools[0]], [pools[1]], fraction=fraction, **options)
    masks = saliency_masks(model, gather(model, [pools[0]]), fraction, Training(epochs=1, lr=1, batch_size=5))
    total = sum(mask.numel() for mask in masks.values())
    assert sum(int(mask.sum()) for mask in masks.values()) == round(fraction * total)
    after = dict(found.named_parameters())
    for name, before in model.named_parameters():
        same = after[name].detach().view(torch.int32) == before.detach().view(torch.int32)
        assert same[~masks[name]].all()
        assert not same[masks[name]].any()


@pytest.mark.parametrize("fraction", [0, 1.5, None])
def test_the_fraction_is_a_share(fraction):
    with pytest.raises(BaselineError, match=r"fraction=.*above 0 to 1"):
        salun(mlp((5, 7, 3)), [forget], [retain], fraction=fraction)
