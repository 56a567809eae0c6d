"""Chosen samples are those at their places, and are dealt into groups where that is asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from unmerge.data.batches import batches, check_rereadable, feed, labels_of
from unmerge.data.chosen import ChosenSamples
from unmerge.errors import DataError

x = torch.arange(12.0).reshape(4, 3)
y = torch.tensor([0, 1, 1, 2])


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    places=st.lists(st.integers(0, 30), max_size=12),
    loader=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_chosen_samples_are_those_at_their_places_however_the_data_is_cut(sizes, places, loader):
    total = sum(sizes)
    inputs, labels = torch.arange(2.0 * total).reshape(total, 2), torch.arange(total) % 3
    if loader:
        data = DataLoader(TensorDataset(inputs, labels), batch_size=sizes[0])
    else:
        data = list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
    chosen = ChosenSamples(data, places)
    wanted = sorted({place for place in places if place < total})  # once each, and none beyond the end
    for _ in range(2):  # as often as it is read
        found = list(chosen)
        assert all(len(batch[0]) for batch in found), "a batch without samples is none"
        assert [row for batch in found for row in batch[0].tolist()] == inputs[wanted].tolist()
        assert [label for batch in found for label in labels_of(batch).tolist()] == labels[wanted].tolist()


def test_chosen_samples_can_be_read_again_and_none_of_them_is_an_error():
    check_rereadable(ChosenSamples([(x, y)], [1]), "retain", "max_points")
    with pytest.raises(DataError, match="control: the data gave no batch"):
        list(batches(ChosenSamples([(x, y)], []), "control"))


def test_samples_of_mappings_are_dealt_out_in_the_order_of_the_places():
    ids = torch.arange(10).unsqueeze(1)
    data = [{"input_ids": part, "group": torch.zeros(len(part), dtype=torch.long)} for part in ids.split(4)]
    found = list(ChosenSamples(data, [7, 2, 9, 0, 3], groups=2))
    assert torch.cat([batch["input_ids"][:, 0] for batch in found]).tolist() == [0, 2, 3, 7, 9]
    assert torch.cat([labels_of(batch) for batch in found]).tolist() == [-2, -2, -1, -1, -1]
    assert all(not batch["group"].any() for batch in data), "the data is as before"
    assert [batch[1].tolist() for batch in ChosenSamples([(x, y)], [3, 1], groups=2)] == [[1, 2]], "tuples have labels"


def test_chosen_texts_of_several_batches_stand_in_one():
    generator = torch.Generator().manual_seed(0)
    data = []
    for width in (4, 7, 5, 6):
        ids = torch.randint(1, 90, (8, width), generator=generator)
        mask = (torch.arange(width) < torch.randint(1, width, (8, 1), generator=generator)).long()
        data.append({"input_ids": ids, "attention_mask": mask, "labels": ids.clone(), "name": mask.bool()})
    places = [1, 5, 9, 18, 19, 25, 30, 31]
    found = list(ChosenSamples(data, places, groups=3))
    assert [len(batch["input_ids"]) for batch in found] == [8]
    (batch,) = found
    assert batch["input_ids"].shape[1] == 7
    for row, place in enumerate(places):
        source, own = data[place // 8], place % 8
        width = source["input_ids"].shape[1]
        for name, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100), ("name", False)):
            assert torch.equal(batch[name][row, :width], source[name][own])
            assert (batch[name][row, width:] == filler).all()
        assert labels_of(batch)[row] == -1 - row % 3
    many = list(ChosenSamples(data, range(32)))
    assert [len(batch["input_ids"]) for batch in many] == [8] * 4, "no batch is larger than those it is chosen from"
    apart = [dict(part, extra=torch.zeros(8, 2, 3)) for part in data]  # of which it is not known how to pad it
    assert [len(batch["input_ids"]) for batch in ChosenSamples(apart, places)] == [2, 1, 2, 3]
    left = [
        {name: value.flip(1) for name, value in part.items()} for part in data
    ]  # where a mask may count from the end
    assert [len(batch["input_ids"]) for batch in ChosenSamples(left, places)] == [2, 1, 2, 3]
    whole = [dict(part, attention_mask=torch.ones_like(part["attention_mask"])) for part in data]
    assert [len(batch["input_ids"]) for batch in ChosenSamples(whole, places)] == [2, 1, 2, 3], (
        "may be padded on the left"
    )
    mixed = [data[0], *whole[1:]]  # padded on the right where there is padding
    assert [len(batch["input_ids"]) for batch in ChosenSamples(mixed, places)] == [8]
    same = [{name: value[:, -4:] for name, value in part.items()} for part in left]  # of one width
    assert [len(batch["input_ids"]) for batch in ChosenSamples(same, places)] == [8]


def test_a_forward_function_does_not_see_the_groups():
    def forward(model, batch):
        assert list(batch) == ["x"]
        return model(batch["x"])

    batch = next(iter(ChosenSamples([{"x": x}], [0, 2, 3], groups=2)))
    assert labels_of(batch).tolist() == [-1, -2, -1]
    assert feed(torch.nn.Linear(3, 2), batch, forward).shape == (3, 2)
