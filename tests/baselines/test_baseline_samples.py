"""Samples are held as one batch in the form that they came in, and drawn from it."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from networks import batched, mlp, request
from unmerge.baselines.options import BaselineError
from unmerge.baselines.samples import chunks, gather
from unmerge.errors import DataError

forget, retain = request((5,), each=6)
model = mlp((5, 7, 3))
Pair = namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        Pair,
        lambda x, y: (x, y, torch.arange(len(y)), ["name"] * len(y)),
        lambda x, y: {"input": x, "labels": y, "flag": True, "scale": torch.tensor(2.0)},
    ],
)
def test_drawn_batches_have_the_form_of_those_read(form):
    pools = ([form(*batch) for batch in batched(pool, 4)] for pool in (forget, retain))
    samples = gather(model, *pools, forward=lambda model, batch: model(next(iter(_values(batch)))))
    assert samples.forget.tolist() == list(range(6))
    assert samples.retain.tolist() == list(range(6, 18))
    batch, labels = samples.take(torch.tensor([17, 2, 5]))
    assert type(batch) is type(form(*forget))
    inputs = torch.cat([forget[0], retain[0]])
    assert next(iter(_values(batch))).equal(inputs[[17, 2, 5]])
    assert labels.equal(torch.cat([forget[1], retain[1]])[[17, 2, 5]])


def _values(batch):
    return batch.values() if isinstance(batch, dict) else batch


def test_a_mapping_keeps_what_is_no_sample():
    batch = {"input": forget[0], "labels": forget[1], "flag": True, "scale": torch.tensor(2.0)}
    taken, _ = gather(model, [batch], forward=lambda model, batch: model(batch["input"])).take(torch.tensor([1]))
    assert taken["flag"] is True
    assert taken["scale"] == 2
    assert len(taken["labels"]) == 1


@given(count=st.integers(1, 40), size=st.integers(1, 12))
@settings(deadline=None)
def test_batches_hold_every_place_once_and_no_last_one_is_alone(count, size):
    parts = chunks(torch.arange(count), size)
    assert torch.cat(parts).equal(torch.arange(count))
    assert all(len(part) >= min(2, count, size) for part in parts)
    assert all(len(part) <= size + 1 for part in parts)


def test_a_shuffle_goes_round_where_more_are_asked_for():
    samples = gather(model, [forget], [retain])
    generator = torch.Generator().manual_seed(0)
    places = torch.cat(samples.shuffled(samples.forget, 4, generator, 15))
    assert len(places) == 15
    assert places.bincount().tolist() == pytest.approx([2.5] * 6, abs=0.5)


@given(limit=st.integers(1, 20), size=st.integers(1, 12), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_a_limit_keeps_different_samples_of_the_pool(limit, size, seed):
    samples = gather(model, None, batched(retain, size), retain_limit=limit, seed=seed)
    assert len(samples.labels) == min(limit, 12)
    places = [(retain[0] == row).all(1).nonzero().item() for row in samples.whole[0]]
    assert len(set(places)) == len(places)
    assert samples.labels.equal(retain[1][places])


def test_a_limit_is_drawn_evenly():
    counts = torch.zeros(12)
    for seed in range(300):
        kept = gather(model, None, batched(retain, 5), retain_limit=4, seed=seed).whole[0]
        counts[[(retain[0] == row).all(1).nonzero().item() for row in kept]] += 1
    assert counts.min() > 65  # of 100 expected, four deviations below
    assert counts.max() < 135


def test_an_iterator_and_a_loader_are_read_once():
    loader = DataLoader(TensorDataset(*forget), batch_size=4)
    assert gather(model, iter(batched(forget, 4))).whole[0].equal(gather(model, loader).whole[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([forget[0]], "forget: a batch of type Tensor has no class labels"),
        ([(forget[0], forget[0])], "no class labels"),
        ([], "forget: the data gave no batch"),
        ([(forget[0][:0], forget[1][:0])], "forget: the batches hold no sample"),
        ([(forget[0], forget[1] + 3)], r"labels 3 are outside 0 to 2"),
        ([forget, (forget[0][:, :4], forget[1])], r"shapes \(4,\) and \(5,\)"),
        ([forget, list(forget)], "different entries"),
        (forget, "expected an iterable of batches"),
    ],
)
def test_wrong_data_are_named(data, message):
    with pytest.raises(DataError, match=message):
        gather(model, data)


def test_a_model_that_returns_no_logits_is_named():
    with pytest.raises(DataError, match=r"a tensor of shape \(2,\).*forward="):
        gather(model, [forget], forward=lambda model, batch: model(batch[0])[:, 0])
    with pytest.raises(DataError, match="returned str"):
        gather(model, [forget], forward=lambda model, batch: "logits")
    with pytest.raises(BaselineError, match="hold='disk'"):
        gather(model, [forget], hold="disk")
