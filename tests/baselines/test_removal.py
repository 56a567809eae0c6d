"""Head removal takes the forgotten rows out of the classifier, as an edit does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unmerge
from networks import conv1d_net, hf_resnet, mlp, ready, request
from unmerge.baselines import head_removal
from unmerge.errors import LayerError

forget, retain = request((5,), each=6)


def test_the_rows_are_what_an_edit_of_strength_zero_removes():
    model = mlp((5, 7, 3))
    found = head_removal(model, [forget], [retain])
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=unmerge.Recipe(head="remove"))
    edit.apply(model, alpha=0.0)
    for (name, expected), tensor in zip(model.named_parameters(), found.parameters(), strict=True):
        assert tensor.equal(expected), name
    assert (found[2].weight[0] == 0).all()
    assert found[2].bias[0] == -1e4


def test_convolutions_transposed_heads_and_transformers():
    found = head_removal(ready(nn.Sequential(nn.Conv2d(3, 3, 4), nn.Flatten())), *_images(4))
    assert (found[0].weight[0] == 0).all()
    head = ready(nn.Sequential(nn.Linear(5, 5), conv1d_net(5, 3)[0]))
    found = head_removal(head, [forget], [retain])
    assert (found[1].weight[:, 0] == 0).all()
    assert (found[1].weight[:, 1:] != 0).all()
    images = _images(32)
    resnet = head_removal(hf_resnet(), *images)
    assert (resnet(images[0][0][0]).logits[:, 0] == -1e4).all()


def test_rows_are_gone_inside_autocast():
    model = mlp((5, 7, 3), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = head_removal(model, [_half(forget)], [_half(retain)])
    for name, tensor in head_removal(model, [_half(forget)], [_half(retain)]).state_dict().items():
        assert tensor.equal(inside.state_dict()[name]), name


def _half(pool):
    return pool[0].float(), pool[1]


def _images(size):
    return [[pool] for pool in request((3, size, size), each=3)]


def test_a_head_without_bias_or_that_is_not_the_classifier_is_refused():
    bare = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()
    with pytest.raises(LayerError, match=r"no bias.*logit_mask"):
        head_removal(bare, [forget], [retain])
    model = mlp((5, 7, 3))
    with pytest.raises(LayerError, match=r"'0'.*not the classifier"):
        head_removal(model, [forget], [retain], head="0")
    with pytest.raises(LayerError, match="head='fc' is no"):
        head_removal(model, [forget], [retain], head="fc")
    assert head_removal(model, [forget], [retain], head="2")[2].bias[0] == -1e4


def test_a_small_layer_named_as_head_is_refused_without_being_indexed():
    model = ready(nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 3)))
    with pytest.raises(LayerError, match="not the classifier"):
        head_removal(model, [forget], classes=[2], head="0")
    assert torch.isfinite(model[0].bias).all()
