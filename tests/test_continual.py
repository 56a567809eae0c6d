"""A later request on a model that carries an edit: from the statistics of before, without another pass over S."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import unmerge
from networks import batched, split
from unmerge import Edit, Recipe, Statistics
from unmerge.bench.digits import accuracy, load_digits, train
from unmerge.editing.rewriting import REMOVED_BIAS
from unmerge.errors import StatisticsError
from unmerge.model.ledger import as_collected, ledger_of, set_aside

TRAIN, TEST = load_digits()
LDA = Recipe(basis="lda")
NOTE = "fitted on the weights from before the edits that the model carried"


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def identical(one: Edit, other: Edit) -> None:
    """Assert that two edits are equal bit for bit."""
    assert list(one.layers) == list(other.layers)
    assert (one.alpha, one.head, one.removed, one.weights) == (other.alpha, other.head, other.removed, other.weights)
    for name, layer in one.layers.items():
        twin = other.layers[name]
        assert layer.B.equal(twin.B), name
        assert layer.Q.equal(twin.Q), name
        assert layer.shift_to == twin.shift_to
        assert layer.shift is twin.shift or layer.shift.equal(twin.shift), name


class Passes:
    """How many samples a model has seen."""

    def __init__(self, model: nn.Module) -> None:
        self.samples = 0
        self._handle = model.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.samples += len(args[0])

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return train(TRAIN, epochs=6)


@pytest.fixture(scope="module")
def everything(trained: nn.Module) -> Statistics:
    return unmerge.collect(trained, TRAIN.loader())


@pytest.fixture
def model(trained: nn.Module) -> nn.Module:
    return copy.deepcopy(trained)


def of_class(model: nn.Module, everything: Statistics, digit: int, **options: Any) -> Edit:
    options = {"recipe": LDA, "init": "zero"} | options
    return unmerge.fit(model, classes=[digit], statistics=everything, **options)


def from_forget(model: nn.Module, everything: Statistics, digit: int, recipe: Recipe = LDA) -> Edit:
    needed = {"per_class": "full"} if recipe.basis == "cav-class" else {}
    lost = unmerge.collect(model, TRAIN.only(digit).loader(), everything, **needed)
    return unmerge.fit(model, lost, everything - lost, init="zero", recipe=recipe)


def from_data_and_statistics(model: nn.Module, everything: Statistics, digit: int) -> Edit:
    """The forget data beside the statistics of what is retained."""
    lost = unmerge.collect(model, TRAIN.only(digit).loader(), everything)
    return unmerge.fit(model, TRAIN.only(digit).loader(), everything - lost, init="zero", recipe=LDA)


def from_statistics_and_data(model: nn.Module, everything: Statistics, digit: int) -> Edit:
    lost = unmerge.collect(model, TRAIN.only(digit).loader(), everything)
    return unmerge.fit(model, lost, TRAIN.without(digit).loader(), init="zero", recipe=LDA)


WAYS: dict[str, Callable[[nn.Module, Statistics, int], Edit]] = {
    "classes": of_class,
    "forget statistics": from_forget,
    "pca": lambda *given: from_forget(*given, Recipe(basis="pca", rank=4)),
    "cav-class": lambda *given: from_forget(*given, Recipe(basis="cav-class")),
    "forget data": from_data_and_statistics,
    "retain data": from_statistics_and_data,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_edit_is_the_one_that_was_possible_before_the_first(
    model: nn.Module, everything: Statistics, way: str
) -> None:
    expected = WAYS[way](model, everything, 5)
    of_class(model, everything, 3).apply(model)
    carried = bits(model)
    found = WAYS[way](model, everything, 5)
    identical(found, expected)
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)
    assert NOTE in found.provenance["notes"]["approximations"]
    assert NOTE not in expected.provenance["notes"]["approximations"]


def test_a_second_request_reads_only_what_it_forgets(model: nn.Module, everything: Statistics) -> None:
    of_class(model, everything, 3).apply(model)
    with Passes(model) as read:
        of_class(model, everything, 5)
        assert read.samples == 0
        from_forget(model, everything, 5)
        assert read.samples == len(TRAIN.only(5).labels)


def test_the_statistics_of_a_later_forget_set_are_those_of_the_original_weights(
    model: nn.Module, everything: Statistics
) -> None:
    expected = unmerge.collect(model, TRAIN.only(5).loader(), everything)
    edit = of_class(model, everything, 3)
    edit.apply(model)
    found = unmerge.collect(model, TRAIN.only(5).loader(), everything)
    assert found.weights == expected.weights == everything.weights
    for name, layer in expected.layers.items():
        assert found[name].moments.mean.equal(layer.moments.mean), name
        assert found[name].moments.gram.equal(layer.moments.gram), name
    plain = unmerge.collect(model, TRAIN.only(5).loader())
    assert not plain["11"].moments.mean.equal(expected["11"].moments.mean), "without S, those of the model as it is"
    assert plain.weights != everything.weights


def test_both_digits_are_forgotten_one_after_the_other_and_the_rest_is_kept(
    model: nn.Module, everything: Statistics
) -> None:
    start, kept = bits(model), accuracy(model, TEST.without(3, 5))
    first = of_class(model, everything, 3).apply(model)
    assert first is model
    second = from_forget(model, everything, 5)
    second.apply(model)
    assert accuracy(model, TEST.only(3)) == accuracy(model, TEST.only(5)) == 0
    assert accuracy(model, TRAIN.only(3)) == accuracy(model, TRAIN.only(5)) == 0
    assert accuracy(model, TEST.without(3, 5)) > kept - 0.02
    assert model.get_parameter("11.bias")[[3, 5]].tolist() == [REMOVED_BIAS] * 2
    together, both = bits(model), [entry.edit for entry in ledger_of(model).entries]
    for edit in both:
        edit.revert(model)
    torch.testing.assert_close(bits(model), start, rtol=0, atol=0)
    unmerge.compose(both).apply(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-5, atol=1e-5)


def test_features_move_for_both_not_only_the_rows_of_the_head(model: nn.Module, everything: Statistics) -> None:
    """With edited heads, forgetting is the edits' own."""
    options = {"recipe": LDA.but(head="edit")}
    before = accuracy(model, TEST.without(3, 5))
    for digit in (3, 5):
        edit = of_class(model, everything, digit, **options)
        edit.apply(model, unmerge.search_alpha(edit, model, TRAIN.only(digit).loader()).alpha)
    assert max(accuracy(model, TRAIN.only(digit)) for digit in (3, 5)) < 0.05
    assert accuracy(model, TEST.without(3, 5)) > before - 0.05


def test_a_third_edit_and_one_taken_out_in_between(model: nn.Module, everything: Statistics) -> None:
    expected = of_class(model, everything, 8)
    first, second = of_class(model, everything, 3), of_class(model, everything, 5)
    first.apply(model)
    second.apply(model, 0.7)
    identical(of_class(model, everything, 8), expected)
    first.revert(model)
    carried = bits(model)
    identical(of_class(model, everything, 8), expected)
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)
    second.revert(model)
    third = of_class(model, everything, 8)
    identical(third, expected)
    assert NOTE not in third.provenance["notes"]["approximations"], "the model carries none"


def test_recalibrated_norms_are_set_aside_too(model: nn.Module, everything: Statistics) -> None:
    expected = from_forget(model, everything, 5)
    of_class(model, everything, 3).apply(model, recalibrate=TRAIN.without(3).loader())
    carried = bits(model)
    identical(from_forget(model, everything, 5), expected)
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)


def test_saved_statistics_serve_as_well(model: nn.Module, everything: Statistics, tmp_path: Path) -> None:
    everything.save(tmp_path / "all.safetensors")
    read = Statistics.load(tmp_path / "all.safetensors")
    of_class(model, read, 3).apply(model)
    identical(of_class(model, read, 5), of_class(model, everything, 5))


def test_statistics_of_the_edited_model_are_used_as_they_are(model: nn.Module, everything: Statistics) -> None:
    of_class(model, everything, 3).apply(model)
    fresh = unmerge.collect(model, TRAIN.without(3).loader())
    edit = of_class(model, fresh, 5)
    assert NOTE not in edit.provenance["notes"]["approximations"]
    assert edit.weights["6.weight"] != everything.weights["6.weight"]
    edit.apply(model)
    assert accuracy(model, TEST.only(5)) == 0


def test_the_initial_weights_are_compared_with_those_from_before(trained: nn.Module, everything: Statistics) -> None:
    """init beside a carried edit: the task vector is that of the un-edited weights."""
    model, init = copy.deepcopy(trained), copy.deepcopy(trained)
    with torch.no_grad():
        for parameter in init.parameters():
            parameter.mul_(0.9)
    expected = of_class(model, everything, 5, init=init)
    of_class(model, everything, 3).apply(model)
    identical(of_class(model, everything, 5, init=init), expected)


# What goes wrong


class OwnError(Exception):
    pass


def broken(digit: int) -> Iterator[Any]:
    yield next(iter(TRAIN.only(digit).loader(32)))
    raise OwnError("disk gone")


@pytest.mark.parametrize("call", ["collect", "fit", "recipe"])
def test_a_failure_in_the_middle_leaves_the_edit_in_place(model: nn.Module, everything: Statistics, call: str) -> None:
    edit = of_class(model, everything, 3)
    start = bits(model)
    edit.apply(model)
    carried = bits(model)
    lost = unmerge.collect(model, TRAIN.only(5).loader(), everything)
    if call == "collect":
        with pytest.raises(OwnError, match="disk gone"):
            unmerge.collect(model, broken(5), everything)
    elif call == "fit":
        with pytest.raises(OwnError, match="disk gone"):
            unmerge.fit(model, broken(5), everything - lost, init="zero", recipe=LDA)
    else:
        with pytest.raises(unmerge.errors.DataError, match="'lda' or 'private-mean'"):
            of_class(model, everything, 5, recipe=Recipe(basis="pca"))
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)
    assert [entry.edit for entry in ledger_of(model).entries] == [edit]
    edit.revert(model)
    torch.testing.assert_close(bits(model), start, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "is_edited"),
    [
        ("0.weight", False),  # upstream of every edited layer
        ("4.running_var", False),
        ("7.weight", False),  # behind the first edited layer
        ("6.weight", True),
        ("7.running_mean", True),  # where a constant went
        ("11.bias", True),
    ],
)
@pytest.mark.parametrize("call", ["classes", "collect"])
def test_weights_that_changed_otherwise_are_named(
    model: nn.Module, everything: Statistics, call: str, name: str, is_edited: bool
) -> None:
    edit = of_class(model, everything, 3)
    edit.apply(model)
    assert (name in edit.touched) is is_edited
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] += 0.5  # training went on
    carried = bits(model)
    ask = {
        "classes": lambda: of_class(model, everything, 5),
        "collect": lambda: unmerge.collect(model, TRAIN.only(5).loader(), everything),
    }[call]
    with pytest.raises(StatisticsError, match=rf"collected with other weights: {name} differ.*Collect them again"):
        ask()
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)


def test_a_model_that_carries_nothing_is_compared_as_it_is(model: nn.Module, everything: Statistics) -> None:
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] += 0.5
    with pytest.raises(StatisticsError, match=r"'3\.weight' differs"):
        of_class(model, everything, 5)


def test_a_copy_of_an_edited_model_does_not_know_its_weights_from_before(
    model: nn.Module, everything: Statistics
) -> None:
    of_class(model, everything, 3).apply(model)
    with pytest.raises(StatisticsError, match=r"'6\.weight' differs"):
        of_class(copy.deepcopy(model), everything, 5)


# The ledger


def test_edits_are_set_aside_inside_a_block_only() -> None:
    model = networks.cnn()
    data = networks.samples((3, 6, 6), [0, 1, 2, 3] * 5)
    forget, retain = split(data, [0])
    start = bits(model)
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=Recipe(basis="lda", skip_layers=0))
    with set_aside(model):  # nothing is carried
        torch.testing.assert_close(bits(model), start, rtol=0, atol=0)
    edit.apply(model, recalibrate=batched(retain, 5))
    carried = bits(model)
    with set_aside(model):
        torch.testing.assert_close(bits(model), start, rtol=0, atol=0)
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)
    with pytest.raises(OwnError), set_aside(model):
        raise OwnError
    torch.testing.assert_close(bits(model), carried, rtol=0, atol=0)


def test_whether_edits_were_set_aside_is_said() -> None:
    model = networks.mlp()
    data = networks.samples((6,), [0, 1, 2, 3] * 5)
    forget, retain = split(data, [0])
    original = unmerge.collect(model, [data])
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=Recipe(basis="lda", skip_layers=0))
    with as_collected(model, original.weights) as aside:
        assert aside is False
    edit.apply(model)
    for weights, expected in ((None, False), (unmerge.collect(model, [data]).weights, False), (original.weights, True)):
        with as_collected(model, weights) as aside:
            assert aside is expected


def test_diagnose_takes_statistics_from_before_an_edit_that_the_model_carries() -> None:
    model = networks.mlp((6, 8, 4))
    forget, retain = networks.request((6,), forgotten=(0, 1), kept=(2, 3), each=20)
    lost = unmerge.collect(model, [forget])
    kept = unmerge.collect(model, [retain], lost)
    before = unmerge.diagnose(lost, kept, model).to_dict()
    unmerge.fit(model, lost, kept, init="zero").apply(model, 1.0)
    carried = bits(model)
    assert unmerge.diagnose(lost, kept, model).to_dict() == before
    assert all(torch.equal(value, carried[name]) for name, value in bits(model).items())
