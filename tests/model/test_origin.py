"""Initial weights that are not those that fine-tuning started from are refused; the true ones are not."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import unmerge
from networks import mlp, request
from unmerge import Edit, Recipe
from unmerge.bench.digits import Split, accuracy, load_digits, train
from unmerge.errors import InitError
from unmerge.model.origin import FOREIGN_COSINE, check_origin, origin_of

TRAIN, TEST = load_digits()
ALL = Recipe(basis="lda", layers=["0", "3", "6", "11"])
RECIPES = {"default": Recipe(), "all layers": ALL, "classifier": Recipe(layers=["11"])}


def finetuned(start: nn.Module, split: Split, lr: float, epochs: int = 3) -> nn.Module:
    """The network trained on from a checkpoint."""
    torch.manual_seed(0)
    model = copy.deepcopy(start).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for chosen in torch.randperm(len(split.labels)).split(64):
            loss = functional.cross_entropy(model(split.images[chosen]), split.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def pretrained() -> nn.Module:
    """Trained on half of the digits."""
    return train(TRAIN.only(0, 1, 2, 3, 4), epochs=4)


@pytest.fixture(scope="module", params=[0.03, 0.1], ids=["small steps", "large steps"])
def tuned(request: pytest.FixtureRequest, pretrained: nn.Module) -> nn.Module:
    """Fine-tuned from there on all of them."""
    model = finetuned(pretrained, TRAIN, lr=request.param)
    assert accuracy(model, TEST) > 0.8
    return model


@pytest.fixture(scope="module")
def stranger() -> nn.Module:
    """Trained on the same digits with another seed."""
    return train(TRAIN.only(0, 1, 2, 3, 4), seed=1, epochs=4)


def forgetting(model: nn.Module, init: Any, *digits: int, **options: Any) -> Edit:
    forget, retain = TRAIN.only(*digits).loader(), TRAIN.without(*digits).loader()
    return unmerge.fit(model, forget, retain, init=init, **({"recipe": Recipe(basis="lda")} | options))


@pytest.mark.parametrize(
    ("recipe", "form"),
    [("default", "module"), ("all layers", "state dict"), ("classifier", "file")],
)
def test_the_checkpoint_that_fine_tuning_started_from_passes(
    tuned: nn.Module, pretrained: nn.Module, recipe: str, form: str, tmp_path: Path
) -> None:
    init: Any = pretrained
    if form == "state dict":
        init = pretrained.state_dict()
    if form == "file":
        init = tmp_path / "pretrained.safetensors"
        save_file(pretrained.state_dict(), init)
    edit = forgetting(tuned, init, 3, recipe=RECIPES[recipe])
    assert edit.layers


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_another_training_is_refused_with_what_to_use_instead(
    tuned: nn.Module, stranger: nn.Module, recipe: str
) -> None:
    before = copy.deepcopy(tuned.state_dict())
    with pytest.raises(InitError, match='init="zero"') as refused:
        forgetting(tuned, stranger, 3, recipe=RECIPES[recipe])
    message = str(refused.value)
    assert "does not look like the checkpoint that this model was fine-tuned from" in message
    assert "check_init=False" in message
    assert "median cosine" in message
    torch.testing.assert_close(tuned.state_dict(), before, rtol=0, atol=0)


def test_freshly_drawn_weights_are_refused_too(tuned: nn.Module) -> None:
    torch.manual_seed(3)
    fresh = copy.deepcopy(tuned)
    for module in fresh.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.reset_parameters()
    with pytest.raises(InitError, match='init="zero"'):
        forgetting(tuned, fresh, 3)


def test_the_guard_can_be_overridden_and_zero_is_never_refused(tuned: nn.Module, stranger: nn.Module) -> None:
    overridden = forgetting(tuned, stranger, 3, check_init=False)
    zero = forgetting(tuned, "zero", 3)
    assert list(overridden.layers) == list(zero.layers)
    assert not overridden.layers["6"].B.equal(zero.layers["6"].B)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tuned.state_dict().items()}
    assert forgetting(tuned, zeros, 3).layers["6"].B.equal(zero.layers["6"].B)


def test_a_new_head_on_a_true_backbone_passes(tuned: nn.Module, pretrained: nn.Module) -> None:
    torch.manual_seed(3)
    reset = copy.deepcopy(pretrained)
    reset[11].reset_parameters()
    forgetting(tuned, reset, 3, recipe=ALL)
    forgetting(tuned, reset, 3)


def test_the_diagnosis_shows_the_origin_of_each_layer(
    tuned: nn.Module, pretrained: nn.Module, stranger: nn.Module
) -> None:
    forget, retain = (unmerge.collect(tuned, part.loader(), ["3", "11"]) for part in (TRAIN.only(3), TRAIN.without(3)))
    recipe = Recipe(basis="lda", layers=["11"])
    for init, is_true in ((pretrained, True), (stranger, False)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            layers = unmerge.diagnose(forget, retain, tuned, init, recipe=recipe).layers
        assert [str(each.message) for each in said if "does not look like" in str(each.message)] == (
            [] if is_true else [str(said[0].message)]
        )
        for name, layer in layers.items():
            own, other = (model.get_parameter(f"{name}.weight").detach().flatten() for model in (tuned, init))
            assert layer.origin is not None
            assert layer.origin.cosine == pytest.approx(functional.cosine_similarity(own, other, 0).item(), abs=1e-5)
            assert layer.origin.norm_ratio == pytest.approx(((own - other).norm() / own.norm()).item(), rel=1e-5)
            assert (layer.origin.cosine > 0.5) is is_true
    zero = unmerge.diagnose(forget, retain, tuned, recipe=recipe)
    assert all(layer.origin is None for layer in zero.layers.values())


# The numbers


@settings(max_examples=40, deadline=None)
@given(
    units=st.integers(1, 5),
    features=st.integers(2, 8),
    groups=st.sampled_from([None, 3]),
    seed=st.integers(0, 1000),
    rank=st.integers(1, 8),
)
def test_cosine_norm_ratio_and_share_outside_equal_their_definitions(
    units: int, features: int, groups: int | None, seed: int, rank: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (units, features) if groups is None else (groups, units, features)
    weight, initial = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    mixed = torch.randn(features, min(rank, features), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(mixed)[0]
    found = origin_of(weight, initial, basis)
    vector = weight - initial
    assert found.cosine == pytest.approx((weight * initial).sum().item() / (weight.norm() * initial.norm()).item())
    assert found.norm_ratio == pytest.approx((vector.norm() / weight.norm()).item())
    missed = vector - vector @ basis @ basis.T
    assert found.outside_span == pytest.approx((missed.norm() / vector.norm()).item() ** 2, abs=1e-9)
    assert origin_of(weight, initial).outside_span is None


def test_a_stranger_of_the_same_size_is_as_far_as_two_independent_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(300, 300, generator=generator) for _ in range(2))
    found = origin_of(one, other)
    assert abs(found.cosine) < 0.02
    assert found.norm_ratio == pytest.approx(math.sqrt(2), rel=0.02)


def weights(*cosines: float) -> list[tuple[Tensor, Tensor]]:
    """Weights, each with initial ones at this cosine to it."""
    own = torch.tensor([[1.0, 0.0]])
    return [(own, torch.tensor([[cosine, math.sqrt(1 - cosine**2)]])) for cosine in cosines]


@pytest.mark.parametrize(
    ("cosines", "refused"),
    [
        ((0.99,), False),
        ((FOREIGN_COSINE + 0.01,), False),
        ((FOREIGN_COSINE - 0.01,), True),
        ((-0.5,), True),
        ((0.0, 0.9), False),  # a new classifier on a true backbone
        ((0.0, 0.9, 0.9), False),
        ((0.0, 0.1, 0.9), True),
        ((0.0, 0.0, 0.1, 0.9), True),
    ],
)
def test_the_median_layer_decides(cosines: tuple[float, ...], refused: bool) -> None:
    if refused:
        with pytest.raises(InitError, match=rf"expected at least {FOREIGN_COSINE}"):
            check_origin(weights(*cosines))
    else:
        check_origin(weights(*cosines))


def test_layers_that_began_at_zero_and_biases_say_nothing() -> None:
    from_zero = (torch.ones(1, 2), torch.zeros(1, 2))
    strange_bias = (torch.ones(2), torch.tensor([1.0, -1.0]))
    check_origin([*weights(0.95), from_zero, strange_bias])
    check_origin([strange_bias])


def test_half_precision_weights_are_compared_wide() -> None:
    model = mlp((6, 8, 4), dtype=torch.bfloat16)
    forget, retain = request((6,), dtype=torch.bfloat16)
    start = {name: (tensor.float() * 1.01).bfloat16() for name, tensor in model.state_dict().items()}
    recipe = Recipe(basis="lda", skip_layers=0, bias="shrink", gamma=0.5)
    assert unmerge.fit(model, [forget], [retain], init=start, recipe=recipe).layers
    foreign = mlp((6, 8, 4), dtype=torch.bfloat16, seed=5)
    with pytest.raises(InitError, match='init="zero"'):
        unmerge.fit(model, [forget], [retain], init=foreign, recipe=recipe)
