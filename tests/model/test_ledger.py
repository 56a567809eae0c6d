"""A model's ledger knows which edits it carries and what was there before."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from networks import batched, cnn, mlp, request, samples
from unmerge import Edit, Recipe, fit
from unmerge.errors import EditError, UnmergeWarning
from unmerge.model.ledger import ledger_of


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def edits(model: nn.Module, shape: tuple[int, ...] = (6,)) -> list[Edit]:
    """Three requests on one checkpoint, on overlapping layers, one of them with removed rows."""
    dtype = next(model.parameters()).dtype
    found = []
    whole = Recipe(skip_layers=0)
    for label, recipe in enumerate((whole, whole.but(skip_layers=1, head="edit"), whole.but(mean="free", head="edit"))):
        forget, retain = request(shape, [label], [other for other in range(4) if other != label], 8, dtype)
        found.append(fit(model, [forget], [retain], init="zero", recipe=recipe))
    return found


@pytest.fixture(scope="module")
def three() -> list[Edit]:
    return edits(mlp(dtype=torch.float32))


@given(order=st.permutations(range(3)), out=st.permutations(range(3)))
@settings(max_examples=20, deadline=None)
def test_edits_come_out_in_any_order_and_leave_exactly_the_others(three, order, out):
    model = mlp(dtype=torch.float32)
    start = bits(model)
    for place in order:
        three[place].apply(model, alpha=1.0 + place, head_alpha=0.5 * place)
    inside = list(order)
    for place in out:
        three[place].revert(model)
        inside.remove(place)
        fresh = mlp(dtype=torch.float32)
        for other in inside:
            three[other].apply(fresh, alpha=1.0 + other, head_alpha=0.5 * other)
        assert_close(bits(model), bits(fresh), rtol=0, atol=0)
    assert_close(bits(model), start, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_a_network_with_batchnorm_come_out_exactly(dtype):
    model = cnn(dtype=dtype)
    first, second, _ = edits(model, (3, 6, 6))
    start = bits(model)
    second.apply(model, 0.7)
    only_second = bits(model)
    second.revert(model)
    first.apply(model, 1.0)
    second.apply(model, 0.7)
    first.revert(model)
    assert_close(bits(model), only_second, rtol=0, atol=0)
    second.revert(model)
    assert_close(bits(model), start, rtol=0, atol=0)


def test_a_failing_edit_leaves_those_that_are_there_with_their_recalibrated_norms():
    model = cnn()
    first, second, _ = edits(model, (3, 6, 6))
    data = batched(samples((3, 6, 6), [1, 2, 3] * 4), 6)
    first.apply(model, 1.0, recalibrate=data)
    before = bits(model)

    class Broken:
        def __iter__(self):
            yield data[0]
            raise KeyError("disk gone")

    with pytest.raises(KeyError):
        second.apply(model, 1.0, recalibrate=Broken())
    assert_close(bits(model), before, rtol=0, atol=0)
    first.revert(model)


def test_the_norms_of_a_recalibrated_edit_that_stays_are_warned_about():
    model = cnn()
    first, second, _ = edits(model, (3, 6, 6))
    data = batched(samples((3, 6, 6), [1, 2, 3] * 4), 6)
    start = bits(model)
    second.apply(model, 1.0)
    first.apply(model, 1.0, recalibrate=data)
    with pytest.warns(UnmergeWarning, match="recalibrate"):
        second.revert(model)
    first.revert(model)
    assert_close(bits(model), start, rtol=0, atol=0)


def test_a_warning_that_is_an_error_leaves_the_model_and_its_ledger_in_step():
    model, fresh = cnn(), cnn()
    first, second, _ = edits(model, (3, 6, 6))
    second.apply(model, 1.0)
    first.apply(model, 1.0, recalibrate=batched(samples((3, 6, 6), [1, 2, 3] * 4), 6))
    both = bits(model)
    first.apply(fresh, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnmergeWarning):
            second.revert(model)
    is_carried = any(entry.edit is second for entry in ledger_of(model).entries)
    expected = both if is_carried else bits(fresh)
    for name in ("conv1.weight", "conv2.weight", "fc.weight", "fc.bias"):
        assert bits(model)[name].equal(expected[name])


def test_a_change_after_the_edit_is_seen_and_only_discarded_by_force():
    model = mlp()
    edit, *_ = edits(model)
    start = bits(model)
    edit.apply(model, 1.0)
    with torch.no_grad():
        model[2].weight += 1  # training went on
    changed = bits(model)
    with pytest.raises(EditError, match=r"2\.weight changed after the edit.*force=True"):
        edit.revert(model)
    assert_close(bits(model), changed, rtol=0, atol=0)
    edit.revert(model, force=True)
    assert_close(bits(model), start, rtol=0, atol=0)


def test_a_change_of_a_tensor_that_the_edit_does_not_touch_is_kept():
    model = cnn()
    edit, *_ = edits(model, (3, 6, 6))
    edit.apply(model, 1.0)
    with torch.no_grad():
        model.bn1.weight += 1
    kept = model.bn1.weight.clone()
    edit.revert(model)
    assert model.bn1.weight.equal(kept)


def test_a_copy_of_a_model_does_not_know_its_edits():
    model = mlp()
    edit, *_ = edits(model)
    edit.apply(model, 1.0)
    twin = copy.deepcopy(model)
    with pytest.raises(EditError, match="A copy of a model"):
        edit.revert(twin)
    edit.revert(model)


def test_two_models_carry_one_edit_independently():
    one, other = mlp(), mlp()
    edit, *_ = edits(one)
    start = bits(one)
    edit.apply(one, 1.0)
    edit.apply(other, 2.0)
    edit.revert(one)
    assert_close(bits(one), start, rtol=0, atol=0)
    assert not bits(other)["2.weight"].equal(start["2.weight"])
    edit.revert(other)
    assert_close(bits(other), start, rtol=0, atol=0)


def test_a_ledger_holds_only_what_the_edits_touch_and_goes_with_the_last():
    model = mlp()
    first, second, _ = edits(model)
    first.apply(model, 1.0)
    second.apply(model, 1.0)
    assert set(ledger_of(model).before) == {f"{name}.{part}" for name in "024" for part in ("weight", "bias")}
    first.revert(model)
    assert set(ledger_of(model).before) == {f"{name}.{part}" for name in "24" for part in ("weight", "bias")}
    second.revert(model)
    assert not ledger_of(model).entries
    assert not ledger_of(model).before


def test_a_ledger_does_not_keep_a_model_alive():
    model = mlp()
    edit, *_ = edits(model)
    edit.apply(model, 1.0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_asking_for_a_ledger_makes_none():
    model = mlp()
    ledger_of(model).before["x"] = torch.zeros(1)
    assert not ledger_of(model).before


def test_the_last_edit_leaves_the_recalibration_of_the_one_before():
    model = cnn()
    first, second = edits(model, (3, 8, 8))[:2]
    _, retain = request((3, 8, 8), [0], [1, 2, 3], 8)
    first.apply(model, 1.0, recalibrate=batched(retain, 8))
    before = bits(model)
    with second.applied(model, 1.0):
        assert not all(torch.equal(value, before[name]) for name, value in bits(model).items())
    assert all(torch.equal(value, before[name]) for name, value in bits(model).items())
