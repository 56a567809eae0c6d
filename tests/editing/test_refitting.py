"""With Recipe(refit=...) the classifier's rows of retained classes answer to edited features as before the edit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

import unmerge
from unmerge import Edit, Recipe
from unmerge.bench.digits import load_digits, train
from unmerge.editing.lengthening import factors, nearest_goes
from unmerge.editing.rewriting import REMOVED_BIAS
from unmerge.errors import DataError, EditError, UnmergeWarning
from unmerge.model.ledger import ledger_of

TRAIN, TEST = load_digits()
KEPT = [label for label in range(10) if label != 3]


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def edit_of(model: nn.Module, label: int = 3, **knobs: object) -> Edit:
    forget, retain = TRAIN.only(label).loader(), TRAIN.without(label).loader()
    recipe = Recipe(**{"refit": 0.03, "skip_layers": 0} | knobs)
    return unmerge.fit(model, forget, retain, init="zero", recipe=recipe)


def without_refit(edit: Edit) -> Edit:
    return replace(edit, recipe=edit.recipe.but(refit=None))


def edited(model: nn.Module, *edits: Edit) -> nn.Module:
    """A copy of the model with the edits, each recalibrated with the training images of all but forgotten classes."""
    model = copy.deepcopy(model)
    for forgotten, edit in zip(((3,), (3, 8)), edits, strict=False):
        edit.apply(model, 1.0, recalibrate=TRAIN.without(*forgotten).loader(), force=not edit.removed)
    return model


@torch.no_grad()
def fitted(before: nn.Sequential, after: nn.Sequential, images: Tensor, rows: list[int], ridge: float) -> list[Tensor]:
    """Weight and bias by least squares with rows for the ridge: what `after` lacks of `before`, told from its own."""
    original, own = (model[:-1](images).double().numpy() for model in (before, after))
    centred, lack = own - own.mean(0), original - own
    ridge = max(ridge, 64 / (2 * len(own)))
    penalty = np.sqrt(ridge * centred.var(0).mean() * len(own)) * np.eye(64)
    targets = np.vstack([lack - lack.mean(0), np.zeros((64, 64))])
    solution = np.linalg.lstsq(np.vstack([centred, penalty]), targets, rcond=None)[0]
    weight, bias = (value.detach().double().numpy().copy() for value in (after[-1].weight, after[-1].bias))
    change = (weight @ solution.T)[rows]
    assert np.abs(change).max() > 1e-2
    weight[rows] += change
    bias[rows] -= change @ own.mean(0)
    return [torch.tensor(value).float() for value in (weight, bias)]


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return train(TRAIN, epochs=6)


@pytest.fixture(scope="module")
def edit(model: nn.Sequential) -> Edit:
    return edit_of(model)


@torch.no_grad()
def test_answers_to_images_that_were_not_seen_are_nearer_to_those_before_the_edit(model, edit):
    images = TEST.without(3).images

    def moved(changed: nn.Module) -> float:
        return (changed(images) - model(images))[:, KEPT].square().mean().item()

    assert moved(edited(model, edit)) < 0.7 * moved(edited(model, without_refit(edit)))


@pytest.mark.parametrize("ridge", [0.0, 0.03, 10.0])
def test_the_rows_are_those_of_a_ridge_regression(model, edit, ridge):
    plain = edited(model, without_refit(edit))
    found = edited(model, replace(edit, recipe=edit.recipe.but(refit=ridge)))
    expected = fitted(model, plain, TRAIN.without(3).images, KEPT, ridge)
    assert_close([found[-1].weight, found[-1].bias], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head", ["remove", "edit"])
@torch.no_grad()
def test_mean_answers_and_forgotten_rows_are_as_without(model, head):
    edit = edit_of(model, head=head)
    plain, found = edited(model, without_refit(edit)), edited(model, edit)
    images = TRAIN.without(3).images
    assert_close(found(images).mean(0), plain(images).mean(0), rtol=0, atol=1e-4)
    assert (found(images) - plain(images))[:, KEPT].abs().max() > 0.1
    assert found[-1].weight[3].equal(plain[-1].weight[3])
    assert found[-1].bias[3].equal(plain[-1].bias[3])
    assert (found[-1].bias[3] == REMOVED_BIAS) == (head == "remove")
    assert bool(found[-1].weight[3].any()) == (head == "edit")
    others = {name: value for name, value in bits(plain).items() if not name.startswith("11.")}
    assert_close({name: bits(found)[name] for name in others}, others, rtol=0, atol=0)


@pytest.mark.parametrize("mean", ["preserve", "free"])
@pytest.mark.parametrize("rows_stay", [False, True])
def test_reverting_is_bit_identical(model, mean, rows_stay):
    """Also of the trial in a search for alpha, which removes no row and so, left free, changes no bias itself."""
    edit = edit_of(model, mean=mean)
    edit = replace(edit, removed=()) if rows_stay else edit
    found = edited(model, edit)
    assert not found[-1].bias.equal(model[-1].bias)
    edit.revert(found)
    assert_close(bits(found), bits(model), rtol=0, atol=0)


class Broken:
    """Images, until the disk goes in one of the passes over them."""

    def __init__(self, broken_pass: int, *without: int) -> None:
        self._passes_left, self._images = broken_pass, TRAIN.without(*without)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self._passes_left -= 1
        for batch in self._images.loader():
            yield batch
            if not self._passes_left:
                raise KeyError("disk gone")


NOT_8 = [label for label in range(10) if label != 8]


@pytest.mark.parametrize(
    "broken",
    [
        lambda: {"recalibrate": Broken(2, 3, 8)},
        lambda: {"recalibrate": Broken(3, 3, 8)},
        lambda: {"recalibrate": TRAIN.without(3, 8).loader(), "forget": Broken(1, *NOT_8)},
    ],
    ids=["norms", "classifier", "forgotten"],
)
def test_a_failure_leaves_the_model_and_its_ledger_as_they_were(model, edit, broken):
    found, second = edited(model, edit), edit_of(model, 8)
    before, ledger = bits(found), copy.copy(ledger_of(found))
    names, hooks = list(ledger.before), len(found[-1]._forward_pre_hooks)
    with pytest.raises(KeyError, match="disk gone"):
        second.apply(found, 1.0, **broken())
    assert_close(bits(found), before, rtol=0, atol=0)
    assert [entry.edit for entry in ledger_of(found).entries] == [edit]
    assert (list(ledger_of(found).before), ledger_of(found).written) == (names, ledger.written)
    assert len(found[-1]._forward_pre_hooks) == hooks
    edit.revert(found)
    assert_close(bits(found), bits(model), rtol=0, atol=0)


@torch.no_grad()
def fitted_with_forgotten(
    before: nn.Sequential, after: nn.Sequential, lost: tuple[int, ...], recipe: Recipe, seen: tuple[int, ...] = ()
) -> list[Tensor]:
    """Weight and bias by least squares: retained images lack what the edit took of them, forgotten ones what it took
    beside the mean of their class and, of their mean answer, what makes it longer; these weigh a fifth."""
    rows = [label for label in range(10) if label not in lost]
    weight, bias = (value.detach().double().clone() for value in (after[-1].weight, after[-1].bias))
    retain, forget = TRAIN.without(*lost), TRAIN.only(*(seen or lost))
    original, own = (model[:-1](retain.images).double() for model in (before, after))
    centre, taken = own.mean(0), original - own
    inputs, targets = [(own - centre) / len(own) ** 0.5], [(taken - taken.mean(0)) @ weight[rows].mT / len(own) ** 0.5]
    ridge = max(recipe.refit, 64 / (2 * len(own))) * own.var(0, correction=0).mean()
    original, own = (model[:-1](forget.images).double() for model in (before, after))
    share = (0.2 / len(own)) ** 0.5
    answers = after(retain.images)[:, rows].double()
    typical = (answers - answers.mean(1, keepdim=True)).square().sum(1).mean().sqrt()
    for label in seen or lost:
        part = forget.labels == label
        taken = (original - own)[part]
        answer = weight[rows] @ own[part].mean(0) + bias[rows]
        times = recipe.answer_length
        if times == "auto":
            nearest = before(forget.images[part]).mean(0).index_fill(0, torch.tensor(label), -torch.inf).argmax()
            least = 1.3 if int(nearest) in lost else 1.0
            times = max(least, (0.55 * typical / (answer - answer.mean()).norm()) ** 0.6)
        lacks = (taken - taken.mean(0)) @ weight[rows].mT + (times - 1) * (answer - answer.mean())
        inputs, targets = [*inputs, share * (own[part] - centre)], [*targets, share * lacks]
    inputs, targets = [*inputs, ridge**0.5 * torch.eye(64)], [*targets, torch.zeros(64, len(rows))]
    change = torch.tensor(np.linalg.lstsq(torch.cat(inputs).numpy(), torch.cat(targets).numpy(), rcond=None)[0]).mT
    weight[rows] += change
    bias[rows] -= change @ centre
    return [weight.float(), bias.float()]


def classifier(edit: Edit, model: nn.Module, lost: tuple[int, ...] = (3,), **options: Any) -> list[Tensor]:
    """Its weight and bias in a copy of the model with the edit, refitted."""
    found = edit.apply(copy.deepcopy(model), 1.0, recalibrate=TRAIN.without(*lost).loader(), **options)
    return [found[-1].weight, found[-1].bias]


@pytest.mark.parametrize("lost", [(3,), (3, 8), (3, 9), (5, 7)])  # nearest to 3 is 9, to 7 5, to 8 9 and to 5 3
@pytest.mark.parametrize("knobs", [{}, {"head": "edit", "answer_length": 1.0}, {"answer_length": 2.0}], ids=str)
def test_forgotten_images_count_beside_the_retained_ones(model, lost, knobs):
    forget, retain = TRAIN.only(*lost).loader(), TRAIN.without(*lost).loader()
    edit = unmerge.fit(model, forget, retain, init="zero", recipe=Recipe(refit=0.03, skip_layers=0, **knobs))
    plain = without_refit(edit).apply(copy.deepcopy(model), 1.0, recalibrate=retain)
    found = edit.apply(copy.deepcopy(model), 1.0, recalibrate=retain, forget=forget)
    expected = fitted_with_forgotten(model, plain, lost, edit.recipe)
    assert_close([found[-1].weight, found[-1].bias], expected, rtol=0, atol=1e-4)
    assert (found[-1].weight - classifier(edit, model, lost)[0]).abs().max() > 1e-2
    edit.revert(found)
    assert_close(bits(found), bits(model), rtol=0, atol=0)


def test_the_nearest_class_goes_as_well_where_it_is_not_seen(model):
    lost, seen = (3, 9), (3,)
    forget, retain = TRAIN.only(*seen).loader(), TRAIN.without(*lost).loader()
    edit = unmerge.fit(model, TRAIN.only(*lost).loader(), retain, init="zero", recipe=Recipe(skip_layers=0))
    plain = without_refit(edit).apply(copy.deepcopy(model), 1.0, recalibrate=retain)
    expected = fitted_with_forgotten(model, plain, lost, edit.recipe, seen)
    assert_close(classifier(edit, model, lost, forget=forget), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head", ["remove", "edit"])
@pytest.mark.parametrize("lost", [(3, 8), (3, 8, 9)])
def test_composed_edits_forget_the_classes_of_each(model, lost, head):
    both = unmerge.compose([edit_of(model, digit, head=head) for digit in lost[:2]])
    if len(lost) > 2:
        both = unmerge.compose([both, edit_of(model, lost[2], head=head)])
    plain = without_refit(both).apply(copy.deepcopy(model), 1.0, recalibrate=TRAIN.without(*lost).loader())
    expected = fitted_with_forgotten(model, plain, lost, both.recipe)
    assert_close(classifier(both, model, lost, forget=TRAIN.only(*lost).loader()), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_mean_answers_to_forgotten_images_get_longer_and_retained_ones_stay(model, edit):
    forget, retain = TRAIN.only(3), TRAIN.without(3)
    lengths = []
    for length in (1.0, 1.5):
        own = replace(edit, recipe=edit.recipe.but(answer_length=length))
        found = own.apply(copy.deepcopy(model), 1.0, recalibrate=retain.loader(), forget=forget.loader())
        answer = found(forget.images)[:, KEPT].mean(0)
        lengths.append((answer - answer.mean()).norm())
        assert_close(found(retain.images).mean(0), edited(model, edit)(retain.images).mean(0), rtol=0, atol=1e-4)
    assert 1.1 < lengths[1] / lengths[0] < 1.5


def test_the_longer_a_mean_answer_the_less_it_is_lengthened_and_a_long_one_stays():
    lengths, typical = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.5, 6.0, 20.0]), torch.tensor(10.0)
    found = factors(lengths, typical, torch.zeros(7, dtype=torch.bool))
    assert found.isfinite().all()
    assert (found.diff() <= 0).all()
    assert found[1] / found[2] == pytest.approx(2**0.6)
    assert found[3] > 1
    assert found[4:].tolist() == pytest.approx([1, 1, 1])
    nearest = torch.tensor([True, False, True, False, True, False, True])
    assert_close(factors(lengths, typical, nearest), torch.where(nearest, found.clamp_min(1.3), found))


def test_the_nearest_class_is_that_of_the_highest_output_but_its_own():
    answers = torch.tensor([[9.0, 2.0, 1.0, 1.0], [5.0, 9.0, 3.0, 1.0], [1.0, 3.0, 9.0, 9.0], [2.0, 1.0, 4.0, 3.0]])
    assert nearest_goes(answers, [0, 1, 2, 7]).tolist() == [True, True, False, True]
    assert nearest_goes(answers[:, :1], []).tolist() == [False]


@torch.no_grad()
def test_an_edit_without_classes_takes_all_forgotten_images_for_one(model):
    edit = replace(edit_of(model, head="edit"), provenance={})
    retain, images = TRAIN.without(3).loader(), [(TRAIN.only(3).images,)]
    found = edit.apply(copy.deepcopy(model), recalibrate=retain, forget=images)
    expected = edit_of(model, head="edit").apply(
        copy.deepcopy(model), recalibrate=retain, forget=TRAIN.only(3).loader()
    )
    assert_close(bits(found), bits(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        lambda images, labels: images,
        lambda images, labels: (images, labels.to(torch.uint8)),
        lambda images, labels: {"input": images, "labels": labels},
    ],
    ids=["unlabelled", "small integers", "mapping"],
)
def test_forgotten_images_of_one_class_need_no_labels_and_take_any_form(model, edit, form):
    expected = classifier(edit, model, forget=TRAIN.only(3).loader())
    found = classifier(edit, model, forget=[form(*batch) for batch in TRAIN.only(3).loader()])
    assert_close(found, expected)


def test_a_forward_may_call_the_classifier_twice(model):
    forget, retain = TRAIN.only(3, 8).loader(), TRAIN.without(3, 8).loader()
    edit = unmerge.fit(model, forget, retain, init="zero", recipe=Recipe(refit=0.03, skip_layers=0))

    def twice(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (network(batch[0]) + network(batch[0])) / 2

    found, expected = (classifier(edit, model, (3, 8), forget=forget, forward=forward) for forward in (twice, None))
    assert_close(found, expected, rtol=0, atol=1e-4)

    def half(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return network(batch[0][: (len(batch[0]) + 1) // 2])

    with pytest.raises(DataError, match=r"one row a sample, leave forget= out, or refit nothing: Recipe\(refit=None\)"):
        classifier(edit, model, (3, 8), forget=forget, forward=half)


def test_forgotten_images_that_cannot_be_used_are_told(model):
    edit = unmerge.fit(
        model, TRAIN.only(3, 8).loader(), TRAIN.without(3, 8).loader(), init="zero", recipe=Recipe(skip_layers=0)
    )
    forget, retain = list(TRAIN.only(3, 8).loader()), TRAIN.without(3, 8).loader()
    untouched, before = copy.deepcopy(model), bits(model)
    with pytest.raises(EditError, match="Pass retained batches as recalibrate="):
        edit.apply(untouched, 1.0, forget=forget)
    wrong = [
        (TRAIN.only(3).images, "expected an iterable of batches"),
        ([], "gave no batch"),
        ([images for images, _ in forget], r"classes \[3, 8\]: pass batches \(inputs, labels\)"),
        ([(images, nn.functional.one_hot(labels, 10)) for images, labels in forget], r"one-hot: pass it \.argmax"),
        (TRAIN.only(3, 5).loader(), r"the class 5, and this edit forgets \[3, 8\]"),
        ([(images, labels - 4) for images, labels in forget], "the class -1"),
        ([(images * torch.nan, labels) for images, labels in forget], "not finite; look at the batches of forget="),
        ([(images[:0], labels[:0]) for images, labels in forget], "no sample of forget= reaches"),
    ]
    for given, said in wrong:
        with pytest.raises(DataError, match=said):
            edit.apply(untouched, 1.0, recalibrate=retain, forget=given)
        assert_close(bits(untouched), before, rtol=0, atol=0)


def test_where_nothing_is_refitted_forgotten_images_are_not_read(model, edit):
    def unread() -> Iterator[Any]:
        raise AssertionError("read")
        yield

    class Unread:
        __iter__ = staticmethod(unread)

    for other in (without_refit(edit), edit_of(model, basis="lda", alpha=1.0)):
        other.apply(copy.deepcopy(model), 1.0, recalibrate=TRAIN.without(3).loader(), forget=Unread())


def test_a_refit_that_the_type_cannot_hold_is_refused(model):
    half, forget, retain = copy.deepcopy(model).half(), TRAIN.only(3).loader(), TRAIN.without(3).loader()

    def in_half(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return network(batch[0].half())

    recipe = Recipe(skip_layers=0, answer_length=1e7)
    edit = unmerge.fit(half, forget, retain, init="zero", recipe=recipe, forward=in_half)
    before = bits(half)
    with pytest.raises(EditError, match="the refit makes"):
        edit.apply(half, recalibrate=retain, forget=forget, forward=in_half)
    assert_close(bits(half), before, rtol=0, atol=0)


@torch.no_grad()
def test_a_second_edit_follows_the_model_with_the_first(model, edit):
    second = edit_of(model, 8)
    first, both, plain = (edited(model, edit, *more) for more in ((), (second,), (without_refit(second),)))
    assert both[-1].bias[[3, 8]].tolist() == [REMOVED_BIAS] * 2
    assert not both[-1].weight[[3, 8]].any()
    rows = [label for label in KEPT if label != 8]
    expected = fitted(first, plain, TRAIN.without(3, 8).images, rows, 0.03)
    assert_close([both[-1].weight, both[-1].bias], expected, rtol=0, atol=1e-4)


def test_without_a_norm_behind_or_with_another_classifier_nothing_is_fitted(model):
    fused = nn.Sequential(*(fuse_conv_bn_eval(model[place], model[place + 1]) for place in (0, 3, 6)))
    fused = nn.Sequential(*(part for conv in fused for part in (conv, nn.ReLU())), *copy.deepcopy(model[-3:]))
    edit = edit_of(fused)
    with pytest.warns(UnmergeWarning, match="no BatchNorm lies behind"):
        found = edited(fused, edit)
    assert list(edit.layers) == ["0", "2", "4", "8"]
    assert_close(bits(found), bits(edit.apply(copy.deepcopy(fused), 1.0)), rtol=0, atol=0)

    transposed = Conv1D(10, 64)
    transposed.load_state_dict({"weight": model[-1].weight.mT, "bias": model[-1].bias})
    other = nn.Sequential(*copy.deepcopy(model[:-1]), transposed)
    edit = edit_of(other)
    assert edit.head == "11"
    expected = bits(edited(other, without_refit(edit)))
    assert_close(bits(edited(other, edit)), expected, rtol=0, atol=0)
    edit.apply(other, 1.0, recalibrate=TRAIN.without(3).loader(), forget=TRAIN.only(3).loader())
    assert_close(bits(other), expected, rtol=0, atol=0)


class ByKeyword(nn.Module):
    """A network that names the input of its classifier."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.body, self.classifier = copy.deepcopy(model[:-1]), copy.deepcopy(model[-1])

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(input=self.body(images))


def test_an_input_by_name_is_seen(model):
    named = ByKeyword(model)
    edit = edit_of(named)
    found, expected = edited(named, edit).classifier, edited(model, edit_of(model))[-1]
    assert_close([found.weight, found.bias], [expected.weight, expected.bias])


def test_both_passes_draw_the_same_random_numbers(model, edit):
    """Else what differs between them would be noise that no feature tells, and the weights would shrink."""
    drawn: list[Tensor] = []

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        drawn.append(0.3 * torch.randn_like(batch[0]))
        return model(batch[0] + drawn[-1])

    retain = list(TRAIN.without(3).loader())
    edit.apply(copy.deepcopy(model), 1.0, recalibrate=retain, forward=noisy)
    refit = drawn[-2 * len(retain) :]
    assert all(first.equal(second) for first, second in zip(refit[::2], refit[1::2], strict=True))
    assert not refit[0].equal(refit[2])


def test_a_forward_that_ends_before_the_classifier_leaves_it(model, edit):
    def features(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model[:-1](batch[0])

    retain = TRAIN.without(3).loader()
    found = edit.apply(copy.deepcopy(model), 1.0, recalibrate=retain, forward=features)
    assert_close(bits(found), bits(edited(model, without_refit(edit))), rtol=0, atol=0)


def test_inputs_that_are_not_finite_are_told(model, edit):
    class Overflow(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return features * torch.where(features > 1, torch.inf, 1.0)

    broken = nn.Sequential(*copy.deepcopy(model[:-1]), nn.Sequential(Overflow(), copy.deepcopy(model[-1])))
    moved = {f"11.1{name[2:]}" if name.startswith("11") else name: layer for name, layer in edit.layers.items()}
    layers = {name: replace(layer, shift_to=None, shift=None) for name, layer in moved.items()}
    own = replace(edit, layers=layers, head="11.1", weights={})
    before = bits(broken)
    with pytest.raises(DataError, match=r"inputs of the classifier '11\.1' are not finite"):
        own.apply(broken, 1.0, recalibrate=TRAIN.without(3).loader(), force=True)
    assert_close(bits(broken), before, rtol=0, atol=0)


def test_edits_without_a_ridge_of_their_own_refit_nothing(model, edit):
    header = edit.to_dict()
    del header["recipe"]["refit"]  # as a file from before there was one
    tensors = {f"{name}:{part}": value for name, layer in edit.layers.items() for part, value in layer.tensors.items()}
    assert Edit.from_dict(header, tensors, Path("old")).recipe.refit is None
    assert unmerge.compose([edit, edit_of(model, 8)]).recipe.refit == 0.03
    for knobs in ({"refit": 1.0}, {"basis": "lda", "alpha": 1.0}):
        others = [edit, edit_of(model, 8, **knobs)]
        assert unmerge.compose(others).recipe.refit is None


def test_composed_edits_keep_a_length_that_they_share(model):
    long, longer = (edit_of(model, digit, answer_length=length) for digit, length in ((3, 2.0), (8, 3.0)))
    assert unmerge.compose([long, edit_of(model, 8, answer_length=2.0)]).recipe.answer_length == 2.0
    other = unmerge.compose([long, longer]).recipe
    assert (other.answer_length, other.refit) == ("auto", long.recipe.refit)
