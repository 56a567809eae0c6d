"""compose(): one edit that does what several do, with orthonormal bases."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import unmerge
from networks import batched, request, split
from unmerge import Edit, LayerEdit, Recipe, Statistics, compose
from unmerge.bench.digits import accuracy, load_digits, train
from unmerge.editing.rewriting import REMOVED_BIAS
from unmerge.errors import EditError

TRAIN, TEST = load_digits()


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def orthonormality(basis: Tensor) -> float:
    """How far the columns are from orthonormal, over all groups."""
    columns = basis.double()
    return (columns.mT @ columns - torch.eye(basis.shape[-1], dtype=torch.float64)).abs().max().item()


def same_result(model: nn.Module, edits: list[Edit], alphas: list[float] | None, images: Tensor) -> Edit:
    """Assert that one composed edit gives what all give, whatever their order; returns it."""
    before = bits(model)
    composed = compose(edits) if alphas is None else compose(edits, alphas)
    for layer in composed.layers.values():
        assert orthonormality(layer.Q) < 1e-5
    with composed.applied(model), torch.no_grad():
        found, outputs = bits(model), model(images)
    for order in (list(range(len(edits))), list(range(len(edits)))[::-1]):
        for place in order:
            edits[place].apply(model, None if alphas is None else alphas[place])
        with torch.no_grad():
            torch.testing.assert_close(outputs, model(images), rtol=1e-5, atol=1e-5)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        for place in order:
            edits[place].revert(model)
    assert any(not found[name].equal(before[name]) for name in before)
    torch.testing.assert_close(bits(model), before, rtol=0, atol=0)
    return composed


# Digits


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return train(TRAIN, epochs=6)


@pytest.fixture(scope="module")
def everything(model: nn.Module) -> Statistics:
    return unmerge.collect(model, TRAIN.loader())


def of_class(model: nn.Module, everything: Statistics, *digits: int, **knobs: Any) -> Edit:
    recipe = Recipe(**({"basis": "lda"} | knobs))
    return unmerge.fit(model, classes=digits, statistics=everything, init="zero", recipe=recipe)


def test_two_digits_with_removed_rows(model: nn.Module, everything: Statistics) -> None:
    three, five = (of_class(model, everything, digit) for digit in (3, 5))
    composed = same_result(model, [three, five], None, TEST.images)
    assert composed.removed == (3, 5)
    assert composed.alpha == 1
    assert composed.head == "11"
    with composed.applied(model):
        assert model.get_parameter("11.bias")[[3, 5]].tolist() == [REMOVED_BIAS] * 2
        assert not model.get_parameter("11.weight")[[3, 5]].any()
        assert accuracy(model, TEST.only(3, 5)) == 0
        assert accuracy(model, TEST.without(3, 5)) > 0.95


@pytest.mark.parametrize("alphas", [[1.5, 2.5], [4.0, 0.0], [0.3, 0.3]])
def test_edited_heads_at_different_strengths(model: nn.Module, everything: Statistics, alphas: list[float]) -> None:
    edits = [of_class(model, everything, digit, head="edit") for digit in (3, 5)]
    composed = same_result(model, edits, alphas, TEST.images)
    assert composed.removed == ()
    assert composed.alpha == 1


@pytest.mark.parametrize(
    "knobs",
    [
        {"basis": "private-mean"},
        {"basis": "private-mean", "skip_layers": 0},
        {"skip_layers": 0, "mean": "free"},
        {"alpha": 1.7, "head": "keep"},
    ],
    ids=["private-mean", "private-mean in all layers", "all layers, mean free", "head kept"],
)
def test_other_recipes(model: nn.Module, everything: Statistics, knobs: dict[str, Any]) -> None:
    edits = [of_class(model, everything, *digits, **knobs) for digits in ((3,), (5, 8), (0,))]
    composed = same_result(model, edits, None, TEST.images)
    assert set(composed.layers) == {name for edit in edits for name in edit.layers}
    assert composed.weights == edits[0].weights | edits[1].weights | edits[2].weights
    assert set(composed.weights) == set(composed.touched)


def test_edits_of_different_layers_and_with_different_constants(model: nn.Module, everything: Statistics) -> None:
    edits = [
        of_class(model, everything, 3, layers=["3", "11"], head="edit"),
        of_class(model, everything, 5, layers=["6", "11"], mean="free", head="edit"),
        of_class(model, everything, 8, layers=["6"]),
    ]
    composed = same_result(model, edits, [1.0, 2.0, 0.5], TEST.images)
    assert list(composed.layers) == ["3", "11", "6"]
    assert composed.layers["11"].rank == 2
    assert composed.layers["3"].rank == composed.layers["3"].Q.shape[1] == 1


def test_directions_that_two_edits_share_are_held_once(model: nn.Module, everything: Statistics) -> None:
    three, both = of_class(model, everything, 3, head="edit"), of_class(model, everything, 3, 5, head="edit")
    halves = {name: replace(layer, B=layer.B / 2) for name, layer in three.layers.items()}
    composed = same_result(model, [three, replace(three, layers=halves)], [1.0, 1.0], TEST.images)
    assert {layer.rank for layer in composed.layers.values()} == {1}
    for name, layer in composed.layers.items():
        torch.testing.assert_close(
            layer.B @ layer.Q.T, 1.5 * three.layers[name].B @ three.layers[name].Q.T, rtol=1e-5, atol=1e-6
        )
    composed = same_result(model, [three, both], [1.0, 1.0], TEST.images)
    assert {layer.rank for layer in composed.layers.values()} <= {2, 3}


def test_a_part_of_strength_zero_takes_nothing_out(model: nn.Module, everything: Statistics) -> None:
    composed = compose([of_class(model, everything, digit) for digit in (3, 5)], [1.0, 0.0])
    assert composed.removed == (3,)
    with composed.applied(model), torch.no_grad():
        assert accuracy(model, TEST.only(3)) == 0
        assert accuracy(model, TEST.only(5)) > 0.9


def test_a_part_of_strength_zero_counts_for_nothing(model: nn.Module, everything: Statistics) -> None:
    three, five = of_class(model, everything, 3), of_class(model, everything, 5, refit=None, skip_layers=0)
    alone, composed = compose([three], [1.0]), compose([three, five], [1.0, 0.0])
    assert composed.recipe == alone.recipe
    assert composed.weights == alone.weights
    assert composed.touched == alone.touched
    assert len(composed.provenance["composed_of"]) == 1
    with pytest.raises(EditError, match="every strength is 0"):
        compose([three, five], [0.0, 0.0])


def test_one_edit_is_itself_and_composing_nests(model: nn.Module, everything: Statistics) -> None:
    edits = [of_class(model, everything, digit) for digit in (3, 5, 8)]
    same_result(model, edits[:1], None, TEST.images)
    nested = same_result(model, [compose(edits[:2]), edits[2]], None, TEST.images)
    flat = compose(edits)
    assert nested.removed == flat.removed == (3, 5, 8)
    for name, layer in flat.layers.items():
        other = nested.layers[name]
        torch.testing.assert_close(layer.B @ layer.Q.T, other.B @ other.Q.T, rtol=1e-4, atol=1e-6)


def test_a_composed_edit_is_saved_and_read(model: nn.Module, everything: Statistics, tmp_path: Path) -> None:
    edits = [of_class(model, everything, digit) for digit in (3, 5)]
    composed = compose(edits, [1.0, 0.8])
    composed.save(tmp_path)
    read = Edit.load(tmp_path)
    assert read.to_dict() == composed.to_dict()
    parts = read.provenance["composed_of"]
    assert [(part["alpha"], part["removed"], part["classes"]) for part in parts] == [(1.0, [3], [3]), (0.8, [5], [5])]
    assert [part["recipe"] for part in parts] == [edit.recipe.to_dict() for edit in edits]
    with composed.applied(model):
        expected = bits(model)
    with read.applied(model):
        torch.testing.assert_close(bits(model), expected, rtol=0, atol=0)


def test_a_composed_edit_comes_out_bit_identically_and_leaves_others(model: nn.Module, everything: Statistics) -> None:
    model = copy.deepcopy(model)
    three, five, eight = (of_class(model, everything, digit) for digit in (3, 5, 8))
    start = bits(model)
    composed = compose([three, five])
    eight.apply(model)
    alone = bits(model)
    composed.apply(model)
    composed.revert(model)
    torch.testing.assert_close(bits(model), alone, rtol=0, atol=0)
    composed.apply(model)
    eight.revert(model)
    found = bits(model)
    composed.revert(model)
    torch.testing.assert_close(bits(model), start, rtol=0, atol=0)
    composed.apply(model)
    torch.testing.assert_close(found, bits(model), rtol=0, atol=0)


@pytest.mark.parametrize("out", [0, 1])
def test_reverting_one_of_two_edits_leaves_the_other(model: nn.Module, everything: Statistics, out: int) -> None:
    model = copy.deepcopy(model)
    edits = [of_class(model, everything, digit) for digit in (3, 5)]
    start = bits(model)
    edits[1 - out].apply(model)
    expected = bits(model)
    edits[1 - out].revert(model)
    for edit in edits:
        edit.apply(model)
    edits[out].revert(model)
    torch.testing.assert_close(bits(model), expected, rtol=0, atol=0)
    digit = (3, 5)[1 - out]
    assert model.get_parameter("11.bias")[digit] == REMOVED_BIAS
    assert accuracy(model, TEST.only(digit)) == 0
    assert accuracy(model, TEST.only((3, 5)[out])) > 0.9, "what was reverted is known again"
    edits[1 - out].revert(model)
    torch.testing.assert_close(bits(model), start, rtol=0, atol=0)


def test_a_removed_row_stays_removed_when_a_later_edit_changes_the_head(
    model: nn.Module, everything: Statistics
) -> None:
    model = copy.deepcopy(model)
    three, five = of_class(model, everything, 3), of_class(model, everything, 5, head="edit")
    three.apply(model)
    five.apply(model, 2.0)
    assert model.get_parameter("11.bias")[3] == REMOVED_BIAS
    assert not model.get_parameter("11.weight")[3].any()
    three.revert(model)
    assert model.get_parameter("11.bias")[3] > -100
    assert model.get_parameter("11.weight")[3].any()


# Groups and transposed weights


@pytest.mark.parametrize("basis", ["lda", "pca", "private-mean"])
@pytest.mark.parametrize("kind", ["groups", "depthwise", "plain"])
def test_grouped_convolutions(kind: str, basis: str) -> None:
    model = networks.convolution_net(kind, dtype=torch.float32)
    data = networks.samples((4, 6, 7), [0, 1, 2, 3] * 8, torch.float32)
    edits = []
    for label in (0, 1):
        forget, retain = split(data, [label])
        recipe = Recipe(basis=basis, rank=2, retain_rank=3, skip_layers=0, head="edit")
        edits.append(unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe))
    composed = same_result(model, edits, [1.0, 0.6], data[0])
    if kind != "plain":
        assert composed.layers["conv"].B.dim() == composed.layers["conv"].Q.dim() == 3


def test_transposed_weights(tmp_path: Path) -> None:
    model = networks.conv1d_net(8, 6, 4, dtype=torch.float32)
    data = networks.samples((8,), [0, 1, 2, 3] * 8, torch.float32)
    edits = []
    for label in (0, 1):
        forget, retain = split(data, [label])
        edits.append(unmerge.fit(model, [forget], [retain], init="zero", recipe=Recipe(basis="lda", skip_layers=0)))
    composed = same_result(model, edits, None, data[0])
    assert composed.layers["0"].transposed
    composed.save(tmp_path)
    assert Edit.load(tmp_path).layers["0"].transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_stay_removed_in_any_precision(dtype: torch.dtype) -> None:
    model = networks.mlp(dtype=dtype)
    data = networks.samples((6,), [0, 1, 2, 3] * 6, dtype)
    everything = unmerge.collect(model, [data])
    recipe = Recipe(basis="lda", skip_layers=0)
    edits = [unmerge.fit(model, classes=[label], statistics=everything, init="zero", recipe=recipe) for label in (0, 1)]
    for edit in edits:
        edit.apply(model)
    assert not model.get_parameter("4.weight")[:2].any()
    assert (model.get_parameter("4.bias")[:2] == torch.tensor(REMOVED_BIAS, dtype=dtype)).all()
    assert not set(model(data[0]).argmax(1).tolist()) & {0, 1}


# Any edits


@st.composite
def families(draw: st.DrawFn) -> tuple[list[Edit], list[float]]:
    """Edits of one layer, grouped or not, some of which share directions, and their strengths."""
    seed, groups = draw(st.integers(0, 10_000)), draw(st.sampled_from([None, 1, 3]))
    units, features = draw(st.integers(1, 5)), draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(seed)
    shape = () if groups is None else (groups,)
    edits: list[Edit] = []
    for place in range(draw(st.integers(1, 4))):
        rank = draw(st.integers(1, features))
        columns = torch.randn(*shape, features, rank, generator=generator, dtype=torch.float64)
        shared = draw(st.sampled_from(["none", "all", "first"])) if place else "none"
        if shared != "none":  # in all groups, or in the first alone
            held = slice(None) if groups is None or shared == "all" else slice(1)
            columns[held, ..., :1] = edits[0].layers["0"].Q[held, ..., :1]
        B = torch.randn(*shape, units, rank, generator=generator, dtype=torch.float64)
        shift = torch.randn(units * (groups or 1), generator=generator, dtype=torch.float64)
        to = "0.bias" if draw(st.booleans()) else None
        layer = LayerEdit(B, torch.linalg.qr(columns)[0], None if to is None else shift, to)
        edits.append(Edit({"0": layer}, Recipe(), alpha=draw(st.floats(0.0 if place else 0.1, 3))))
    return edits, [draw(st.floats(0.1, 3)) for _ in edits]


@settings(max_examples=60, deadline=None)
@given(family=families())
def test_any_edits_give_the_sum_of_their_changes_on_an_orthonormal_basis(
    family: tuple[list[Edit], list[float]],
) -> None:
    edits, alphas = family
    for strengths, composed in ((alphas, compose(edits, alphas)), ([e.alpha for e in edits], compose(edits))):
        parts = [(alpha, edit.layers["0"]) for alpha, edit in zip(strengths, edits, strict=True) if alpha > 0]
        layer = composed.layers["0"]
        assert orthonormality(layer.Q) < 1e-10
        assert layer.rank <= min(layer.Q.shape[-2], sum(part.rank for _, part in parts))
        wanted = sum(alpha * part.B @ part.Q.mT for alpha, part in parts)
        torch.testing.assert_close(layer.B @ layer.Q.mT, wanted, rtol=1e-8, atol=1e-9)
        shifts = [(alpha, part.shift) for alpha, part in parts if part.shift is not None]
        assert (layer.shift is None) == (layer.shift_to is None) == (not shifts)
        if shifts:
            torch.testing.assert_close(layer.shift, sum(alpha * shift for alpha, shift in shifts))
    backwards = compose(edits[::-1], alphas[::-1]).layers["0"]
    forwards = compose(edits, alphas).layers["0"]
    torch.testing.assert_close(backwards.B @ backwards.Q.mT, forwards.B @ forwards.Q.mT, rtol=1e-8, atol=1e-9)


def test_a_direction_that_only_one_group_holds_twice_stays_for_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.linalg.qr(torch.randn(3, 6, 1, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    second[0] = first[0]
    B = torch.randn(3, 4, 1, generator=generator, dtype=torch.float64)
    layer = compose([Edit({"0": LayerEdit(B, basis)}, Recipe(), 1.0) for basis in (first, second)]).layers["0"]
    assert layer.rank == 2
    assert orthonormality(layer.Q) < 1e-10
    torch.testing.assert_close(layer.B @ layer.Q.mT, B @ first.mT + B @ second.mT)


# Wrong input


def test_edits_of_different_weights_are_refused() -> None:
    edits = []
    for seed in (0, 1):
        forget, retain = request((6,))
        edits.append(
            unmerge.fit(networks.mlp(seed=seed), [forget], [retain], init="zero", recipe=Recipe(skip_layers=0))
        )
    with pytest.raises(EditError, match=r"fitted on different weights of 0\.weight.*same checkpoint.*statistics="):
        compose(edits)


def test_an_edit_fitted_on_edited_weights_is_refused() -> None:
    """From data, a second edit is fitted on the model as it is."""
    model = networks.mlp()
    data = networks.samples((6,), [0, 1, 2, 3] * 6)
    fits = []
    for label in (0, 1):
        forget, retain = split(data, [label])
        fits.append(unmerge.fit(model, [forget], [retain], init="zero", recipe=Recipe(skip_layers=0)))
        fits[-1].apply(model)
    with pytest.raises(EditError, match="different weights"):
        compose(fits)


def small_edits(**knobs: Any) -> list[Edit]:
    model = networks.mlp()
    data = networks.samples((6,), [0, 1, 2, 3] * 6)
    found = []
    for label in (0, 1):
        forget, retain = split(data, [label])
        recipe = Recipe(basis="lda", skip_layers=0, **knobs)
        found.append(unmerge.fit(model, batched(forget, 6), batched(retain, 6), init="zero", recipe=recipe))
    return found


def test_a_strength_that_nobody_knows_is_asked_for() -> None:
    first, second = small_edits()[0], small_edits(head="edit")[1]
    with pytest.raises(EditError, match=r"places \[1\] recommend no strength\. Pass alphas=.*search_alpha"):
        compose([first, second])
    with pytest.raises(EditError, match=r"places \[0, 1\]"):
        compose([second, second])
    assert compose([first, second], [1.0, 2.0]).layers


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([1.0], r"2 edits and 1 alphas; expected one for each"),
        ([1.0, 1.0, 1.0], r"2 edits and 3 alphas"),
        ([1.0, -1.0], r"alpha=-1\.0 is not a finite number"),
        ([1.0, math.nan], r"alpha=nan"),
        ([1.0, "2"], r"alpha='2'"),
    ],
)
def test_wrong_strengths_are_refused(alphas: list[Any], message: str) -> None:
    with pytest.raises(EditError, match=message):
        compose(small_edits(), alphas)


def test_what_is_no_list_of_edits_is_refused() -> None:
    edits = small_edits()
    for wrong in ([], edits[0], [edits[0], "edit"], [edits[0].layers]):
        with pytest.raises(
            EditError, match=r"compose needs a list of edits, for example compose\(\[edit_a, edit_b\]\)"
        ):
            compose(wrong)
    assert compose(tuple(edits)).removed == compose(edit for edit in edits).removed == (0, 1)


def test_different_classifiers_and_places_for_constants_are_refused() -> None:
    one = torch.ones(1, 1)

    def edit(**fields: Any) -> Edit:
        place = fields.pop("shift_to", None)
        layer = LayerEdit(one, one, None if place is None else one[0], place)
        return Edit({"0": layer}, Recipe(), 1.0, **fields)

    with pytest.raises(EditError, match="different classifiers: fc, head"):
        compose([edit(head="head"), edit(head="fc")])
    with pytest.raises(EditError, match="different places"):
        compose([edit(shift_to="0.bias"), edit(shift_to="1.running_mean")])
    assert compose([edit(head="fc"), edit(shift_to="0.bias")]).head == "fc"
