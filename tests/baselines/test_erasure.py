"""LEACE: features that do not covary with the forgotten classes, and that moved no further than that takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from networks import batched, mlp, request
from unmerge.baselines import leace
from unmerge.errors import DataError, LayerError

SAMPLES = 60


def pools(labels=6, forgotten=(1, 4)):
    """Seven features about the mean of a class, and its label, of forgotten classes and of the others."""
    torch.manual_seed(0)
    classes = torch.arange(SAMPLES) % labels
    inputs = torch.randn(SAMPLES, 7, dtype=torch.float64) + 3 * torch.randn(labels, 7, dtype=torch.float64)[classes]
    is_lost = (classes.unsqueeze(1) == torch.tensor(forgotten)).any(1)
    return [(inputs[chosen], classes[chosen]) for chosen in (is_lost, ~is_lost)]


def features_of(model, inputs):
    """What the model's last layer receives."""
    seen = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    handle = last.register_forward_hook(lambda _, args, __: seen.append(args[0].detach()))
    model(inputs)
    handle.remove()
    return seen[0]


def literal_eraser(features, indicators):
    """x − W⁺ P W (x − mean): whitened, projected on what covaries with the indicators, and coloured again."""
    mean = features.mean(0)
    centred = features - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(features))
    keep = values > 1e-9 * values.max()
    whitening, colouring = (vectors[:, keep] * values[keep] ** power @ vectors[:, keep].T for power in (-0.5, 0.5))
    covariance = centred.T @ (indicators - indicators.mean(0)) / len(features)
    basis, singular, _ = torch.linalg.svd(whitening @ covariance, full_matrices=False)
    basis = basis[:, singular > 1e-9]
    return features - centred @ (colouring @ basis @ basis.T @ whitening).T


@pytest.mark.parametrize("forgotten", [(1,), (1, 4), (0, 2, 3)])
@pytest.mark.parametrize("kind", ["plain", "repeated feature"])
def test_features_are_those_of_the_literal_formula_and_tell_nothing(forgotten, kind):
    forget, retain = pools(forgotten=forgotten)
    model = mlp((7, 5, 6)).double()
    if kind == "repeated feature":
        with torch.no_grad():
            for part in (model[0].weight, model[0].bias):
                part[1] = part[0]
    found = leace(model, batched(forget, 7), batched(retain, 7))
    inputs, labels = (torch.cat(parts) for parts in zip(forget, retain, strict=True))
    indicators = (labels.unsqueeze(1) == torch.tensor(forgotten)).double()

    before, after = features_of(model, inputs), features_of(found, inputs)
    torch.testing.assert_close(after, literal_eraser(before, indicators), rtol=1e-7, atol=1e-7)
    covariance = (after - after.mean(0)).T @ (indicators - indicators.mean(0)) / len(after)
    assert covariance.abs().max() < 1e-10
    torch.testing.assert_close(after.mean(0), before.mean(0))
    torch.testing.assert_close(found(inputs), model[-1](after))


def test_a_model_that_is_one_layer_is_erased_in_front():
    forget, retain = pools()
    model = nn.Linear(7, 6).double()
    found = leace(model, [forget], [retain])
    inputs = torch.cat([forget[0], retain[0]])
    torch.testing.assert_close(found(inputs), model(features_of(found, inputs)))
    assert not features_of(found, inputs).allclose(inputs)


def test_named_classes_alone_are_erased_also_where_retain_has_them():
    forget, retain = pools()
    model = mlp((7, 5, 6)).double()
    with pytest.raises(DataError, match=r"retain has samples of every forget class \(1, 4\)"):
        leace(model, [forget], [forget, retain])
    found = leace(model, [forget], [forget, retain], classes=[4])
    inputs, labels = (torch.cat(parts) for parts in zip(forget, forget, retain, strict=True))
    after = features_of(found, inputs)
    shifts = [(after[labels == label].mean(0) - after.mean(0)).norm() for label in (1, 4)]
    assert shifts[0] > 0.1
    assert shifts[1] < 1e-10


def test_a_classifier_that_is_no_linear_layer_is_refused():
    model = nn.Sequential(nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    forget, retain = request((4, 6, 7), each=6, dtype=torch.float32)
    with pytest.raises(LayerError, match=r"returns no linear layer's output.*head="):
        leace(model, [forget], [retain])
    with pytest.raises(LayerError, match="head='0' is no linear layer"):
        leace(model, [forget], [retain], head="0")


class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(5, 6), nn.Linear(7, 5)

    def forward(self, inputs):
        return self.head(torch.relu(self.body(inputs)))


def test_a_classifier_that_stands_first_is_found_or_named():
    forget, retain = pools()
    model = HeadFirst().double()
    for found in (leace(model, [forget], [retain]), leace(model, [forget], [retain], head="head")):
        assert isinstance(found.head, nn.Sequential)
        assert isinstance(found.body, nn.Linear)
