"""Retraining starts from fresh weights and, like fine-tuning, reads retain alone."""

from __future__ import annotations

import literal
import pytest
import torch
from torch import nn

from networks import cnn, hf_vit, mlp, request
from unmerge.baselines import fine_tune, retrain
from unmerge.baselines.retraining import reinitialise
from unmerge.errors import InitError

forget, retain = request((5,), each=6)


def test_fine_tuning_steps_on_retain():
    model = mlp((5, 7, 3))
    found = fine_tune(model, None, [retain], epochs=2, lr=0.1, momentum=0.5, weight_decay=0.01)
    losses = [lambda weights: literal.cross_entropy(weights, *retain)] * 2
    assert literal.agree(found, literal.descend(literal.weights_of(model), losses, [0.1] * 2, 0.5, 0.01))


@pytest.mark.parametrize("as_state", [False, True])
def test_retraining_from_given_weights_follows_a_cosine(as_state):
    model, init = mlp((5, 7, 3)), mlp((5, 7, 3), seed=9)
    start = init.state_dict() if as_state else init
    found = retrain(model, None, [retain], init=start, epochs=2, lr=0.1, momentum=0.5, weight_decay=0.01)
    losses = [lambda weights: literal.cross_entropy(weights, *retain)] * 2
    assert literal.agree(found, literal.descend(literal.weights_of(init), losses, [0.1, 0.05], 0.5, 0.01))


def test_without_given_weights_every_module_is_fresh_and_the_seed_decides():
    model = cnn(dtype=torch.float32)
    first, again, other = (retrain(model, None, _images(), epochs=0, seed=seed) for seed in (1, 1, 2))
    for name, tensor in first.state_dict().items():
        assert tensor.equal(again.state_dict()[name])
    assert not first.conv1.weight.equal(other.conv1.weight)
    assert first.bn1.running_mean.equal(torch.zeros(5))
    # What a fresh convolution of 27 inputs is drawn from: uniform within 1/√27.
    assert first.conv1.weight.abs().max() <= 27**-0.5 < model.conv1.weight.abs().max()


def _images():
    return [request((3, 6, 6), each=4, dtype=torch.float32)[1]]


def test_attention_gets_its_own_initialisation_and_frozen_weights_are_trained():
    attention = nn.MultiheadAttention(8, 2)
    nn.init.ones_(attention.in_proj_weight)
    reinitialise(attention)
    assert attention.in_proj_weight.std() > 0
    assert (attention.out_proj.bias == 0).all()

    model = mlp((5, 7, 3))
    model[0].requires_grad_(False)
    first, later = (retrain(model, None, [retain], epochs=epochs) for epochs in (0, 2))
    assert not first[0].weight.equal(later[0].weight)


def test_weights_that_nothing_initialises_are_named():
    with pytest.raises(InitError, match=r"cls_token.*init="):
        retrain(hf_vit(), None, [request((3, 8, 8), each=2)[1]], epochs=1)
    with pytest.raises(InitError, match="does not fit"):
        retrain(mlp((5, 7, 3)), None, [retain], init={"0.weight": torch.zeros(1)})
    with pytest.raises(InitError, match="init is a str"):
        retrain(mlp((5, 7, 3)), None, [retain], init="zero")
