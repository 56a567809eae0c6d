"""Which modules are edited, in which order, and a weight as one matrix per group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from networks import CONVOLUTIONS, cnn, conv1d_net, hf_vit, mlp, resnet50_tree
from unmerge.errors import LayerError
from unmerge.model.layers import candidates, device_of_layer, from_matrix, head_of, weight_matrix
from unmerge.model.selection import select


@pytest.mark.parametrize(
    ("skip", "count", "first"),
    [
        (35, 18, "layer3.3.conv2"),
        (40, 13, "layer3.5.conv1"),
        (45, 8, "layer4.0.conv3"),
        (50, 3, "layer4.2.conv1"),
    ],
)
def test_skip_layers_on_resnet50_leaves_the_last_convolutions_and_the_classifier(skip, count, first):
    names = select(resnet50_tree(), skip_layers=skip).names
    assert len(names) == count + 1
    assert (names[0], names[-1]) == (first, "fc")


def test_layers_come_in_the_order_of_named_modules_whatever_order_they_are_named_in():
    model = resnet50_tree()
    order = [name for name, _ in model.named_modules()]
    names = select(model).names
    assert len(names) == 54
    assert names == sorted(names, key=order.index)
    assert select(model, ["fc", "layer1.0.downsample.0", "conv1"]).names == ["conv1", "layer1.0.downsample.0", "fc"]


def test_auto_leaves_the_last_quarter_and_the_classifier():
    assert select(resnet50_tree(), skip_layers="auto").names == select(resnet50_tree(), skip_layers=40).names
    assert select(mlp((4, 4, 4, 4, 4, 2)), skip_layers="auto").names == ["6", "8"]
    assert select(mlp((4, 4, 4, 2)), skip_layers="auto").names == ["2", "4"], "at least one beside it"
    assert select(mlp((4, 2)), skip_layers="auto").names == ["0"]


def test_the_classifier_stays_whatever_is_skipped():
    assert select(cnn(), skip_layers=1000).names == ["fc"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (["conv2"], ["conv2"]),
        ("conv2", ["conv2"]),
        ({"fc": 1, "conv1": 2}, ["conv1", "fc"]),
        ("re:^conv", ["conv1", "conv2"]),
        ("re:[12]$", ["conv1", "conv2"]),
        (["re:1$", "fc"], ["conv1", "fc"]),
        (lambda name, module: isinstance(module, nn.Linear), ["fc"]),
    ],
)
def test_layers_are_chosen_by_list_pattern_or_predicate(choice, expected):
    # `layers` wins over `skip_layers`.
    assert select(cnn(), choice, skip_layers=1000).names == expected


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["conv3"], "'conv3'.*'conv2' or 'conv1'.*re:conv3"),
        ("conv", "re:conv"),
        (["bn1"], "'bn1'"),
        ("re:layer4", "matches none.*conv1, conv2, fc"),
        ("re:[", "no regular expression"),
        ([], "selects none of the 3 layers"),
        (lambda name, module: False, "selects none of the 3 layers"),
    ],
)
def test_a_choice_that_selects_nothing_is_refused_with_what_there_is(choice, message):
    with pytest.raises(LayerError, match=message):
        select(cnn(), choice)


def test_a_model_without_editable_layers_is_refused():
    with pytest.raises(LayerError, match="nothing to edit"):
        select(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))


@pytest.mark.parametrize("skip", [-1, 2.5, "most"])
def test_a_number_of_layers_to_skip_is_whole_and_not_negative(skip):
    with pytest.raises(LayerError, match="skip_layers"):
        select(cnn(), skip_layers=skip)


def test_the_head_is_the_last_linear_layer():
    assert head_of(cnn()) == "fc"
    assert head_of(hf_vit()) == "classifier"
    assert head_of(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(2, 2, 1))) == "0"
    assert head_of(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1))) == "1"


def test_candidates_are_linear_conv2d_and_transformers_conv1d():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Conv2d(2, 2, 1), Conv1D(2, 2), nn.Conv1d(2, 2, 1), nn.Bilinear(2, 2, 2), nn.Embedding(2, 2)
    )
    assert list(candidates(model)) == ["0", "1", "2"]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_weight_is_one_matrix_a_group_and_back(kind):
    module = CONVOLUTIONS[kind]()
    matrix = weight_matrix(module)
    groups, features = module.groups, module.weight[0].numel()
    shape = (6, features) if groups == 1 else (groups, module.out_channels // groups, features)
    assert matrix.shape == shape
    assert from_matrix(matrix, module.weight, transposed=False).equal(module.weight)


def test_conv1d_is_read_as_out_by_in():
    module = conv1d_net(features=6, width=5)[0]
    assert module.weight.shape == (6, 5)
    assert weight_matrix(module).equal(module.weight.T)
    assert from_matrix(weight_matrix(module), module.weight, transposed=True).equal(module.weight)


def tied() -> nn.Module:
    model = mlp((4, 4, 4, 2))
    model[2].weight = model[0].weight
    return model


def weight_normed() -> nn.Module:
    model = mlp((4, 4, 4, 2))
    parametrizations.weight_norm(model[2])
    return model


def spectrally_normed() -> nn.Module:
    model = mlp((4, 4, 4, 2))
    spectral_norm(model[2])
    return model


def quantised() -> nn.Module:
    model = mlp((4, 4, 4, 2))
    model[2].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return model


def packed() -> nn.Module:
    model = mlp((4, 4, 4, 2))
    model[2].weight = nn.Parameter(torch.ones(16))
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tied, "shares its weight with 0"),
        (weight_normed, "parametrized"),
        (spectrally_normed, "parametrized"),
        (quantised, "quantised.*int8"),
        (packed, "packed"),
    ],
)
def test_a_weight_that_cannot_be_edited_is_left_out_by_default_and_an_error_when_named(make, reason):
    model = make()
    selection = select(model)
    assert "2" not in selection.names
    assert "4" in selection.names
    assert "2" in selection.left_out
    with pytest.raises(LayerError, match=f"layer '2' .*{reason}"):
        select(model, ["2"])
    with pytest.raises(LayerError, match="'2'"):
        select(model, "re:^2$")


def test_a_language_models_head_that_shares_the_embedding_is_left_out():
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    selection = select(model)
    assert selection.names == [
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert "transformer.wte" in selection.left_out["lm_head"]


def test_one_module_under_two_names_is_one_layer_and_shares_nothing():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(3, 2))
    assert select(model).names == ["0", "3"]
    assert not select(model).left_out


def test_each_layer_computes_where_its_weight_is():
    model = mlp()
    model[2].to("meta")
    assert [device_of_layer(model, name).type for name in ("0", "2", "4")] == ["cpu", "meta", "cpu"]
