"""The directions of a layer, group by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import reference
from networks import batched, request
from unmerge import Edit, Recipe, Statistics, collect, diagnose, fit
from unmerge.errors import LayerError
from unmerge.requests.request import Request
from unmerge.solving.directions import directions
from unmerge.solving.doses import rising
from unmerge.solving.pooling import pools_of


def made(model: nn.Module, layer: str, recipe: Recipe, classes: int = 4) -> tuple[Request, reference.Layer]:
    """A request over one layer and the reference's directions for it."""
    forget, retain = request((4, 6, 7), forgotten=(0, 1), kept=range(2, classes), each=5)
    lost = collect(model, batched(forget, 4), layers=[layer], per_class="full", sample=10_000)
    kept = collect(model, batched(retain, 4), layers=[layer])
    return Request(lost, kept), reference.unmerge(model, [layer], forget, retain, recipe)[layer]


@pytest.mark.parametrize("basis", ["lda", "cav-class", "contrastive", "pca", "deflated-pca"])
@pytest.mark.parametrize("kind", ["plain", "groups", "depthwise"])
def test_forget_and_retain_directions_are_the_reference_in_every_group(kind: str, basis: str) -> None:
    model = networks.convolution_net(kind)
    recipe = Recipe(basis=basis, rank=3, retain_rank=4, deflate=2)
    made_request, expected = made(model, "conv", recipe)
    found = directions(pools_of(made_request, "conv"), recipe)
    groups = model.conv.groups
    assert found.forget.dim() == (3 if groups > 1 else 2)
    for side, bases in ((found.forget, expected.forget_basis), (found.retain, expected.retain_basis)):
        for basis_found, wanted in zip(side.reshape(groups, *side.shape[-2:]), bases, strict=True):
            assert basis_found.shape == wanted.shape
            assert torch.allclose(basis_found @ basis_found.T, wanted @ wanted.T, atol=1e-6)


def test_a_group_with_fewer_directions_has_zero_columns_at_the_end() -> None:
    model = networks.convolution_net("depthwise")
    with torch.no_grad():
        model.stem.weight[2] = 0
        model.stem.bias[2] = 0
    recipe = Recipe(basis="pca", rank=3, retain_rank=4)
    found = directions(pools_of(made(model, "conv", recipe)[0], "conv"), recipe)
    assert found.rank == 3
    assert found.forget[2].abs().max() == 0
    assert found.retain[2].abs().max() == 0
    assert torch.allclose(found.forget[0].T @ found.forget[0], torch.eye(3, dtype=torch.float64), atol=1e-10)


def test_private_mean_brings_its_own_coefficients_instead_of_a_retain_span() -> None:
    model = networks.convolution_net("groups")
    recipe = Recipe(basis="private-mean")
    made_request, expected = made(model, "conv", recipe)
    found = directions(pools_of(made_request, "conv"), recipe)
    assert found.retain.shape[-1] == 0
    weight = model.conv.weight.detach().reshape(2, 3, -1)
    task = weight @ found.lift @ found.forget.mT
    assert torch.allclose(task, torch.stack(expected.forget_task), atol=1e-8)


@pytest.mark.parametrize("build", ["mlp", "cnn"])
@pytest.mark.parametrize("early", [0.3, 0.0, 1.0])
def test_blend_is_the_mean_of_the_lda_projection_and_the_private_mean_edit_over_again(build: str, early: float) -> None:
    model, shape = (networks.mlp((6, 8, 5)), (6,)) if build == "mlp" else (networks.cnn(), (3, 6, 6))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, *shape, generator=generator, dtype=torch.float64)
    labels = torch.arange(60) % 4
    inputs += labels.reshape(-1, *[1] * len(shape)) / 2
    forget, retain = ([(inputs[part], labels[part])] for part in (labels < 2, labels >= 2))
    # Next to no ridge: blend has one for both, relative to the scatter within classes.
    shared = Recipe(skip_layers=0, head="edit", ridge=1e-9, lam=0)
    edits = {
        basis: fit(model, forget, retain, init="zero", recipe=shared.but(basis=basis, early_strength=early))
        for basis in ("blend", "lda", "private-mean")
    }
    body = [name for name in edits["blend"].layers if name != edits["blend"].head]  # see the test below
    assert len(body) == (1 if build == "mlp" else 2)
    for name, strength in zip(body, [1.0] if build == "mlp" else [1 - (1 - early) / 12, 1.0], strict=True):
        layer = edits["blend"].layers[name]
        parts = [edits[basis].layers.get(name) for basis in ("lda", "private-mean")]
        changes = [part.B @ part.Q.mT for part in parts if part is not None]
        times = strength * (1.32 if len(changes) == 2 else 1)  # one alone is as it is
        assert torch.allclose(layer.B @ layer.Q.mT, times * sum(changes) / len(changes), atol=1e-8), name
        identity = torch.eye(layer.rank, dtype=layer.Q.dtype)
        assert torch.allclose(layer.Q.mT @ layer.Q, identity.expand_as(layer.Q.mT @ layer.Q), atol=1e-6)


def some_classes(classes: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The first class, to be forgotten, and the others."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20 * classes) % classes
    centres = torch.randn(classes, 12, generator=generator, dtype=torch.float64)
    inputs = centres[labels] + torch.randn(len(labels), 12, generator=generator, dtype=torch.float64) / 2
    return [[(inputs[part], labels[part])] for part in (labels < 1, labels >= 1)]


def classifier(classes: int) -> nn.Module:
    """Seven features before the last layer, in which the first class's mean raises the first output."""
    model = networks.mlp((12, 7, classes))
    with torch.no_grad():
        list(model.parameters())[-2].neg_()
    return model


def of_no_row_removed(classes: int) -> list[Statistics]:
    """The statistics behind the edits below."""
    return [collect(classifier(classes), side) for side in some_classes(classes)]


def no_row_removed(classes: int, **knobs: Any) -> tuple[Edit, Edit]:
    """The edits by blend and by private-mean that leave a classifier with seven inputs its rows."""
    shared = Recipe(skip_layers=0, head="edit", **knobs)
    blend, private = (
        fit(classifier(classes), *some_classes(classes), init="zero", recipe=shared.but(basis=basis))
        for basis in ("blend", "private-mean")
    )
    return blend, private


@pytest.mark.parametrize("times", [0.0, 1.0, 3.5])
def test_where_no_row_is_removed_the_classifier_has_the_private_mean_edit_and_the_forgotten_output_falls(
    times: float,
) -> None:
    blend, private = no_row_removed(5, head_strength=times)
    assert blend.head is not None
    own, once = blend.layers[blend.head], private.layers[blend.head]
    change = once.B @ once.Q.mT
    assert change[1:].abs().max() > 1e-3
    change[1:] = 0  # the rows of retained classes are left alone
    assert torch.allclose(own.B @ own.Q.mT, change, atol=1e-9)
    assert own.shift is not None
    assert once.shift is not None
    lost, kept = (statistics[blend.head].moments.mean for statistics in of_no_row_removed(5))
    lower = once.shift * (torch.arange(5) < 1) - own.shift
    weight = list(classifier(5).parameters())[-2]
    assert lower[0].item() == pytest.approx(times * (weight[0] @ (lost - kept)).item())
    assert lower[0] > 0 or times == 0
    assert torch.allclose(lower[1:], torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert blend.alpha == 1
    assert private.alpha is None
    assert "what their own means give them" in blend.provenance["choices"]["alpha"]


def test_blend_grows_over_the_last_twelve_convolutions() -> None:
    layers = [nn.Conv2d(2, 2, 1) for _ in range(19)]
    model = nn.Sequential(nn.Linear(2, 2), *layers, nn.Linear(2, 2))
    names = [str(place) for place in range(len(model))]
    found = rising(model, names, early=0.4)
    assert sorted(found) == sorted(names[1:-1])  # linear layers have all of theirs
    assert [found[name] for name in names[1:8]] == pytest.approx([0.4] * 7)
    assert [found[name] for name in names[7:-1]] == pytest.approx([0.4 + 0.05 * step for step in range(13)])


@pytest.mark.parametrize("head", ["auto", "remove"])
def test_where_rows_are_removed_blend_leaves_the_others_as_they_are(head: str) -> None:
    model = classifier(5)
    edits = {
        basis: fit(model, *some_classes(5), init="zero", recipe=Recipe(skip_layers=0, head=head, basis=basis))
        for basis in ("blend", "lda")
    }
    *_, last = model.children()
    before = [last.weight[1:].clone(), last.bias[1:].clone()]
    with edits["blend"].applied(model):
        assert last.weight[0].eq(0).all()
        assert all(now[1:].equal(then) for now, then in zip((last.weight, last.bias), before, strict=True))
    with edits["lda"].applied(model):
        assert not last.weight[1:].equal(before[0])


@pytest.mark.parametrize("forgotten", [(5, 2), (1,), (4, 0, 3)])
@pytest.mark.parametrize("source", ["data", "classes"])
def test_every_forgotten_output_falls_by_what_its_own_mean_gives_it(forgotten: tuple[int, ...], source: str) -> None:
    model = classifier(6)
    sides = some_classes(6)
    inputs, labels = (torch.cat([side[0][part] for side in sides]) for part in (0, 1))
    with torch.no_grad():
        list(model.parameters())[-2][4].neg_()  # an output that its own class does not raise is left as it is
    lost = torch.isin(labels, torch.tensor(forgotten))
    recipe = Recipe(skip_layers=0, head="edit")
    once = recipe.but(head_strength=0)
    if source == "data":
        parts = [[(inputs[part], labels[part])] for part in (lost, ~lost)]
        edits = [fit(model, *parts, init="zero", recipe=each) for each in (recipe, once)]
    else:
        everything = collect(model, [(inputs, labels)])
        edits = [
            fit(model, classes=forgotten, statistics=everything, init="zero", recipe=each) for each in (recipe, once)
        ]
    assert edits[0].head is not None
    shifts = [edit.layers[edit.head].shift for edit in edits if edit.head is not None]
    assert shifts[0] is not None
    assert shifts[1] is not None
    with torch.no_grad():
        *_, last = model.children()
        features = inputs
        for layer in list(model.children())[:-1]:
            features = layer(features)
        kept = features[~lost].mean(0)
        expected = torch.zeros(6, dtype=torch.float64)
        for label in forgotten:
            expected[label] = max(0.0, (last.weight[label] @ (features[labels == label].mean(0) - kept)).item())
    assert torch.allclose(shifts[1] - shifts[0], expected, atol=1e-6)
    assert (expected > 0).sum() >= 1


def test_where_the_retained_means_span_the_classifier_s_input_the_strength_stays_open() -> None:
    blend, private = no_row_removed(9)
    assert blend.head in blend.layers
    assert blend.head not in private.layers
    assert blend.alpha is None
    assert "search_alpha" in blend.provenance["choices"]["alpha"]


@pytest.mark.parametrize("reason", ["no bias", "labels are no outputs", "mean free"])
def test_a_classifier_that_cannot_forget_alone_is_edited_like_any_layer(reason: str) -> None:
    model = networks.mlp((12, 7, 5))
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100) % 5
    inputs = torch.randn(100, 12, generator=generator, dtype=torch.float64) + labels.unsqueeze(1) / 2
    forget, retain = (labels < 1), (labels >= 1)
    if reason == "no bias":
        list(model.modules())[-1].bias = None
    offset = 9 if reason == "labels are no outputs" else 0
    recipe = Recipe(skip_layers=0, head="edit", mean="free" if reason == "mean free" else "auto")
    sides = ([(inputs[part], labels[part] + offset)] for part in (forget, retain))
    edit = fit(model, *sides, init="zero", recipe=recipe)
    assert edit.alpha is None
    assert "search_alpha" in edit.provenance["choices"]["alpha"]


def test_the_diagnosis_is_of_the_classifier_s_own_edit() -> None:
    model = networks.mlp((12, 7, 5))
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100) % 5
    inputs = torch.randn(100, 12, generator=generator, dtype=torch.float64) + labels.unsqueeze(1) / 2
    sides = [[(inputs[part], labels[part])] for part in (labels < 1, labels >= 1)]
    responses = {}
    for basis in ("blend", "private-mean", "lda"):
        recipe = Recipe(skip_layers=0, head="edit", basis=basis)
        edit = fit(model, *sides, init="zero", recipe=recipe)
        found = diagnose(*sides, model, init="zero", recipe=recipe)
        assert edit.head is not None
        responses[basis] = found.layers[edit.head].retain_response
        layer = edit.layers[edit.head]
        *before, _ = model.children()
        kept = nn.Sequential(*before)(sides[1][0][0]).detach()
        moved = kept @ layer.Q @ layer.B.mT
        assert responses[basis] == pytest.approx(moved.square().sum(1).mean().item())
    assert responses["blend"] < 0.9 * responses["private-mean"]  # of which it has one row of five


@pytest.mark.parametrize("basis", ["blend", "lda"])
def test_a_layer_that_no_retained_class_reaches_is_named(basis: str) -> None:
    model = networks.mlp((6, 7, 3))
    labels = torch.arange(30) % 3
    inputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + labels.unsqueeze(1)
    statistics = collect(model, [(inputs, labels)])
    name = next(iter(statistics.layers))
    statistics[name].class_rows[1:] = 0  # as of an expert to which only the first class was sent
    with pytest.raises(LayerError, match=f"layer '{name}' saw no row of a retained class"):
        fit(model, classes=[0], statistics=statistics, init="zero", recipe=Recipe(basis=basis, skip_layers=0))
