"""A batch is a tensor, a tuple or a mapping, and its parts are found in each."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from networks import hf_vit, mlp
from unmerge.data.batches import (
    batches,
    check_iterable,
    check_rereadable,
    feed,
    first_samples,
    first_tensor,
    inputs_of,
    labels_of,
    logits_of,
    map_tensors,
    mask_of,
    select_samples,
)
from unmerge.errors import DataError

Pair = namedtuple("Pair", ["image", "label"])

x = torch.arange(12.0).reshape(4, 3)
y = torch.tensor([0, 1, 1, 2])
mask = torch.tensor([[1, 1, 0]] * 4)


def test_inputs_are_the_tensor_the_first_entry_or_the_mapping_without_labels():
    assert inputs_of(x) is x
    assert inputs_of((x, y)) is x
    assert inputs_of([x, y]) is x
    assert inputs_of({"pixel_values": x, "labels": y, "attention_mask": mask}).keys() == {
        "pixel_values",
        "attention_mask",
    }


@pytest.mark.parametrize("batch", [(x, y), [x, y], Pair(x, y), {"x": x, "labels": y}, (x, y, "more")])
def test_labels_are_found_in_tuples_and_mappings(batch):
    assert labels_of(batch) is y


@pytest.mark.parametrize(
    "batch",
    [
        x,
        (x,),
        (x, y.float()),  # regression targets
        (x, y > 0),  # flags
        (x, y[:3]),  # not one a sample
        (x, torch.stack([y, y], dim=1)),  # token labels
        (x, torch.tensor(1)),
        (x, [0, 1, 1, 2]),
        {"x": x},
        {"x": x, "labels": mask},
    ],
)
def test_only_a_whole_number_a_sample_is_a_class_label(batch):
    assert labels_of(batch) is None


def test_the_first_tensor_counts_the_samples():
    assert first_tensor({"flag": True, "scale": torch.tensor(2.0), "x": x}) is x
    for empty in ({"labels": y}, "text", 3, (), ("a", y), {}):
        with pytest.raises(DataError, match="forward="):
            first_tensor(empty)


def test_a_mask_is_a_function_an_entry_or_the_attention_mask():
    assert mask_of((x, y), None) is None
    assert mask_of({"x": x, "attention_mask": mask}, None).equal(mask.bool())
    assert mask_of({"x": x, "attention_mask": mask[:, None, None]}, None) is None  # of another meaning
    assert mask_of({"x": x, "valid": mask}, "valid").equal(mask.bool())
    assert mask_of((x, y), lambda batch: batch[0] > 3).equal(x > 3)


@pytest.mark.parametrize("batch", [(x, y), {"x": x}])
def test_a_mask_that_is_not_in_the_batch_is_refused(batch):
    with pytest.raises(DataError, match="mask='valid'"):
        mask_of(batch, "valid")


@given(st.integers(0, 6), st.sampled_from(["tensor", "tuple", "list", "named", "mapping"]))
@settings(max_examples=30, deadline=None)
def test_the_head_of_a_batch_cuts_every_tensor_that_has_one_entry_a_sample(count, kind):
    batch = {
        "tensor": x,
        "tuple": (x, y),
        "list": [x, y],
        "named": Pair(x, y),
        "mapping": {"x": x, "labels": y, "scale": torch.ones(()), "name": "a"},
    }[kind]
    cut = first_samples(batch, count)
    assert type(cut) is type(batch)
    assert first_tensor(cut).equal(x[:count])
    if kind != "tensor":
        assert labels_of(cut).equal(y[:count])
    if kind == "mapping":
        assert cut["scale"] == 1
        assert cut["name"] == "a"


def test_tensors_are_changed_within_any_structure():
    nested = {"a": [x, (y, Pair(x, "name"))], "b": BatchEncoding({"ids": y})}
    doubled = map_tensors(nested, lambda tensor: tensor * 2)
    assert doubled["a"][0].equal(2 * x)
    assert doubled["a"][1][0].equal(2 * y)
    assert doubled["a"][1][1] == Pair(doubled["a"][1][1].image, "name")
    assert doubled["b"]["ids"].equal(2 * y)


def test_feeding_a_tensor_a_tuple_a_mapping_or_by_forward_gives_one_output():
    model = mlp((3, 4, 2), dtype=torch.float32)
    expected = model(x)
    assert feed(model, x).equal(expected)
    assert feed(model, (x, y)).equal(expected)
    assert feed(model, {"input": x, "labels": y}).equal(expected)
    assert feed(model, {"deep": {"x": x}}, lambda model, batch: model(batch["deep"]["x"])).equal(expected)


def test_logits_are_found_in_what_models_return():
    output = hf_vit()(torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    assert logits_of(output) is output.logits
    assert logits_of(x) is x
    assert logits_of((x, y)) is x
    assert logits_of({"logits": x}) is x
    assert logits_of({"loss": x}) is None
    assert logits_of(None) is None


@pytest.mark.parametrize("data", [x, {"x": x}, "cifar10", b"bytes", 7, None, hf_vit])
def test_what_is_no_iterable_of_batches_is_refused_with_what_to_type(data):
    with pytest.raises(DataError, match=rf"forget: .*{type(data).__name__}.*\[batch\]"):
        check_iterable(data, "forget")


def test_a_second_pass_needs_more_than_an_iterator():
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    for fine in (loader, [(x, y)], (x,), range(3)):
        check_rereadable(fine, "retain", "max_points")
    for once in (iter([(x, y)]), (batch for batch in loader), map(tuple, [(x, y)])):
        with pytest.raises(DataError, match=r"retain is a one-shot iterator .* max_points"):
            check_rereadable(once, "retain", "max_points")


def test_asking_whether_data_can_be_read_again_draws_no_random_numbers():
    loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    check_rereadable(loader, "retain", "max_points")
    assert torch.get_rng_state().equal(before)


def test_batches_come_in_order_and_none_is_an_error():
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    assert [len(batch[0]) for batch in batches(loader, "forget")] == [3, 1]
    with pytest.raises(DataError, match="forget: the data gave no batch"):
        list(batches([], "forget"))
    used = iter([x])
    next(used)
    with pytest.raises(DataError, match="read before is empty"):
        list(batches(used, "forget"))


def test_an_exception_of_the_data_passes_through_unchanged():
    class OwnError(Exception):
        pass

    def data():
        yield x
        raise OwnError("disk gone")

    with pytest.raises(OwnError, match="disk gone"):
        list(batches(data(), "forget"))


@given(st.lists(st.integers(0, 3), max_size=6), st.sampled_from(["tensor", "tuple", "list", "named", "mapping"]))
@settings(max_examples=30, deadline=None)
def test_samples_are_taken_out_of_every_tensor_that_has_one_entry_a_sample(places, kind):
    batch = {
        "tensor": x,
        "tuple": (x, y),
        "list": [x, y],
        "named": Pair(x, y),
        "mapping": {"x": x, "labels": y, "scale": torch.ones(()), "other": torch.ones(7), "name": "a"},
    }[kind]
    chosen = select_samples(batch, torch.tensor(places, dtype=torch.int64))
    assert type(chosen) is type(batch)
    assert first_tensor(chosen).equal(x[places])
    if kind != "tensor":
        assert labels_of(chosen).equal(y[places])
    if kind == "mapping":
        assert chosen["scale"] == 1
        assert chosen["other"].equal(torch.ones(7))
        assert chosen["name"] == "a"
