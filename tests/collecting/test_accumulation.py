"""A layer's inputs, batch by batch, end as the sums that a direct computation gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import decoder, padded, sentences
from networks import CONVOLUTIONS, Batch, batched, samples
from unmerge import collect
from unmerge.collecting import accumulation, unfolding
from unmerge.collecting.accumulation import Accumulator, Keep, LayerStatistics, Reservoir
from unmerge.collecting.batch_facts import BatchFacts, Counting
from unmerge.collecting.unfolding import rows
from unmerge.errors import DataError
from unmerge.sums.moments import Moments

# A module of each way to count, and the shape of one of its inputs.
LAYERS = {
    "linear": (nn.Linear(6, 2), (6,)),
    "tokens": (nn.Linear(6, 2), (5, 6)),
    "by shift": (CONVOLUTIONS["plain"](), (4, 6, 7)),
    "unfolded": (CONVOLUTIONS["stride"](), (4, 6, 7)),
    "grouped": (CONVOLUTIONS["groups"](), (4, 6, 7)),
    "depthwise": (CONVOLUTIONS["depthwise"](), (4, 6, 7)),
}


def facts_of(labels: Tensor | None, size: int, mask: Tensor | None = None) -> BatchFacts:
    """Facts of a batch in which class 0 was seen first, then class 1, and so on up to class 3."""
    present = () if labels is None else tuple(labels.unique().tolist())
    counting = None if mask is None else Counting.of(mask)
    return BatchFacts(size=size, codes=labels, present=present, classes=4, counting=counting)


def accumulate(
    module: nn.Module, batches: Sequence[Batch], labelled: bool = True, pivot: Tensor | None = None, **kept: int
) -> LayerStatistics:
    accumulator = Accumulator(module, labelled, Keep(**kept), pivot=pivot)
    for inputs, labels in batches:
        accumulator.add(inputs, facts_of(labels if labelled else None, len(inputs)))
    return accumulator.finish()


def direct(module: nn.Module, inputs: Tensor, chosen: Tensor | slice = slice(None)) -> Tensor:
    """All rows of the chosen samples, (rows, features) or (groups, rows, features)."""
    return rows(module, inputs)[..., chosen, :, :].flatten(-3, -2)


def assert_same(found: Moments, expected: Moments, **within: float) -> None:
    assert found.n == expected.n
    assert_close(found.mean, expected.mean, **within)
    assert_close(found.scatter, expected.scatter, **within)


def assert_same_statistics(found: LayerStatistics, expected: LayerStatistics, **within: float) -> None:
    assert_same(found.moments, expected.moments, **within)
    assert_close(found.class_rows, expected.class_rows)
    assert_close(found.class_sums, expected.class_sums, **within)
    assert sorted(found.class_moments) == sorted(expected.class_moments)
    for label, moments in found.class_moments.items():
        assert_same(moments, expected.class_moments[label], **within)
    assert (found.sample is None) == (expected.sample is None)
    assert found.sample is None or found.sample.equal(expected.sample)


labellings = st.lists(st.integers(0, 3), min_size=1, max_size=10)


@pytest.mark.parametrize("kind", LAYERS)
@given(labels=labellings, sizes=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=15, deadline=None)
def test_class_rows_and_sums_are_those_of_a_direct_computation(kind, labels, sizes):
    module, shape = LAYERS[kind]
    data = samples(shape, labels)
    found = accumulate(module, batched(data, sizes))
    assert_same(found.moments, Moments.of(direct(module, data[0])))
    assert len(found.class_rows) == len(found.class_sums) == 4
    for label in range(4):
        own = direct(module, data[0], data[1] == label)
        assert found.class_rows[label] == own.shape[-2]
        assert_close(found.class_sums[label], own.sum(-2))


@pytest.mark.parametrize("kind", LAYERS)
@given(labels=labellings, sizes=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=15, deadline=None)
def test_full_class_moments_are_those_of_each_class_and_add_up(kind, labels, sizes):
    module, shape = LAYERS[kind]
    data = samples(shape, labels)
    found = accumulate(module, batched(data, sizes), full=True)
    assert_same(found.moments, Moments.of(direct(module, data[0])))
    assert sorted(found.class_moments) == sorted(set(labels))
    for label, moments in found.class_moments.items():
        own = direct(module, data[0], data[1] == label)
        assert_same(moments, Moments.of(own))
        assert found.class_rows[label] == own.shape[-2]
        assert_close(found.class_sums[label], own.sum(-2))


kept_options = pytest.mark.parametrize(
    "options", [{}, {"full": True}, {"full": True, "max_points": 50}, {"sample": 10_000}], ids=str
)


@pytest.mark.parametrize("kind", ["unfolded", "grouped"])
@kept_options
def test_unfolding_in_pieces_changes_nothing(kind, options, monkeypatch):
    module, shape = LAYERS[kind]
    batches = batched(samples(shape, [0, 1, 1, 2, 0, 1, 3]), 4)
    expected = accumulate(module, batches, **options)
    monkeypatch.setitem(unfolding.CHUNK, "cpu", 1)  # a sample at a time
    assert_same_statistics(accumulate(module, batches, **options), expected)


@pytest.mark.parametrize("mean", [0.0, 100.0], ids=["zero", "far"])  # the second needs a pivot
@kept_options
def test_features_that_are_counted_taps_first_end_in_the_order_of_the_weight(mean, options, monkeypatch):
    module, shape = LAYERS["unfolded"]
    inputs, labels = samples(shape, [0, 1, 1, 2, 0, 1, 3])
    batches = batched((inputs + mean * torch.arange(1.0, 5).view(4, 1, 1), labels), 4)
    pivot = rows(module, batches[0][0]).flatten(0, 1).mean(0)
    expected = accumulate(module, batches, pivot=pivot, **options)
    monkeypatch.setattr(accumulation, "can_be_taps_first", lambda *_: True)
    with monkeypatch.context() as patch:
        used = []
        unfold = unfolding.rows_taps_first
        patch.setattr(unfolding, "rows_taps_first", lambda *given: used.append(1) or unfold(*given))
        assert_same_statistics(accumulate(module, batches, pivot=pivot, **options), expected)
    assert used


def test_without_labels_there_is_nothing_by_class():
    module, shape = LAYERS["linear"]
    found = accumulate(module, batched(samples(shape, [0, 1, 2]), 2), labelled=False, full=True)
    assert found.moments.n == 3
    assert len(found.class_rows) == len(found.class_sums) == len(found.class_moments) == 0


@pytest.mark.parametrize("kind", ["linear", "tokens", "unfolded", "grouped", "by shift"])
@pytest.mark.parametrize("points", [1, 7, 10_000])
def test_max_points_counts_the_first_rows_and_no_more(kind, points):
    module, shape = LAYERS[kind]
    data = samples(shape, [0, 1, 1, 2, 0, 1])
    found = accumulate(module, batched(data, 2), labelled=False, max_points=points)
    assert_same(found.moments, Moments.of(direct(module, data[0])[..., :points, :]))


def test_max_points_limits_the_class_moments_alike():
    module, shape = LAYERS["tokens"]
    data = samples(shape, [0, 1, 1, 2])
    found = accumulate(module, batched(data, 2), max_points=7, full=True)
    kept, labels = direct(module, data[0])[:7], data[1].repeat_interleave(5)[:7]
    assert found.class_rows[:2].tolist() == [5, 2]
    assert found.class_rows.sum() == found.moments.n
    assert_close(found.class_sums[:2], torch.stack([kept[labels == label].sum(0) for label in (0, 1)]))


def test_an_accumulator_is_full_when_it_has_its_rows():
    module, shape = LAYERS["tokens"]
    inputs, _ = samples(shape, [0, 1])
    accumulator = Accumulator(module, False, Keep(max_points=11))
    accumulator.add(inputs, facts_of(None, 2))
    assert not accumulator.is_full
    accumulator.add(inputs, facts_of(None, 2))
    assert accumulator.is_full


@pytest.mark.parametrize("full", [True, False])
def test_a_mask_drops_rows_everywhere(full):
    module, shape = LAYERS["tokens"]
    inputs, labels = samples(shape, [0, 1, 1])
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]).bool()
    accumulator = Accumulator(module, True, Keep(full=full, sample=100))
    accumulator.add(inputs, facts_of(labels, 3, mask))
    found = accumulator.finish()
    assert_same(found.moments, Moments.of(inputs[mask]))
    assert found.class_rows[:2].tolist() == [2, 6]
    assert_close(found.class_sums[:2], torch.stack([inputs[:1][mask[:1]].sum(0), inputs[1:][mask[1:]].sum(0)]))
    assert_close(found.sample, inputs[mask])


def test_what_stands_in_dropped_rows_does_not_matter():
    module, shape = LAYERS["tokens"]
    inputs, labels = samples(shape, [0, 1, 1])
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 3).bool()
    inputs[~mask] = torch.nan
    accumulator = Accumulator(module, True, Keep())
    accumulator.add(inputs, facts_of(labels, 3, mask))
    found = accumulator.finish()
    assert found.moments.scatter.isfinite().all()
    assert found.class_sums.isfinite().all()


def test_a_mask_also_fits_flattened_tokens_and_passes_over_pooled_rows():
    module = nn.Linear(6, 2)
    inputs, labels = samples((5, 6), [0, 1])
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    flat = Accumulator(module, True, Keep())
    flat.add(inputs.flatten(0, 1), facts_of(labels, 2, mask))
    assert_same(flat.finish().moments, Moments.of(inputs[mask]))
    assert flat.finish().class_rows[:2].tolist() == [2, 4]
    pooled = Accumulator(module, True, Keep())
    pooled.add(inputs[:, 0], facts_of(labels, 2, mask))
    assert pooled.finish().moments.n == 2


def test_a_first_batch_of_which_nothing_counts_is_no_error():
    module, shape = LAYERS["tokens"]
    inputs, _ = samples(shape, [0, 1])
    accumulator = Accumulator(module, False, Keep())
    accumulator.add(inputs, facts_of(None, 2, torch.zeros(2, 5, dtype=torch.bool)))
    assert accumulator.is_empty
    assert accumulator.witness().isfinite()
    accumulator.add(inputs, facts_of(None, 2, torch.ones(2, 5, dtype=torch.bool)))
    assert accumulator.finish().moments.n == 10


def test_a_mask_of_another_length_is_refused():
    module, shape = LAYERS["tokens"]
    inputs, _ = samples(shape, [0, 1])
    with pytest.raises(DataError, match=r"mask has shape \(2, 4\).*2 x 5 rows"):
        Accumulator(module, False, Keep()).add(inputs, facts_of(None, 2, torch.ones(2, 4).bool()))


def test_a_mask_is_heeded_by_a_convolution_too():
    """A plain convolution is counted by shift only where every position counts."""
    module, shape = LAYERS["by shift"]
    inputs, _ = samples(shape, [0, 1])
    mask = torch.zeros(2, 42).bool()
    mask[:, :10] = True
    accumulator = Accumulator(module, False, Keep())
    accumulator.add(inputs, facts_of(None, 2, mask))
    assert accumulator.finish().moments.n == 20


def test_rows_that_belong_to_no_sample_cannot_be_labelled():
    module = nn.Linear(6, 2)
    inputs, labels = samples((6,), [0, 1, 1])
    with pytest.raises(DataError, match="3 rows for 2 samples"):
        Accumulator(module, True, Keep()).add(inputs, facts_of(labels[:2], 2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_not_finite_is_seen(kind, value):
    module, shape = LAYERS[kind]
    inputs, labels = samples(shape, [0, 1, 0])
    accumulator = Accumulator(module, True, Keep())
    accumulator.add(inputs, facts_of(labels, 3))
    assert accumulator.witness().isfinite()
    inputs[1].view(-1)[3] = value
    accumulator.add(inputs, facts_of(labels, 3))
    assert not accumulator.witness().isfinite()


@given(size=st.integers(1, 20), parts=st.lists(st.integers(0, 15), min_size=1, max_size=5), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_reservoir_keeps_different_rows_up_to_its_size(size, parts, seed):
    values = torch.arange(float(sum(parts))).unsqueeze(1)
    kept = []
    for _ in range(2):
        reservoir = Reservoir(size, seed)
        for part in values.split(parts):
            reservoir.offer(part)
        kept.append(reservoir.rows)
    assert kept[0].equal(kept[1])
    assert len(kept[0]) == min(size, len(values))
    assert set(kept[0].flatten().tolist()) <= set(values.flatten().tolist())
    assert len(kept[0].unique()) == len(kept[0])


def test_a_reservoir_draws_every_row_with_the_same_chance():
    values = torch.arange(40.0).unsqueeze(1)
    drawn = torch.zeros(40)
    for seed in range(600):
        reservoir = Reservoir(10, seed)
        for part in values.split([25, 1, 14]):
            reservoir.offer(part)
        drawn[reservoir.rows.flatten().long()] += 1
    # 600 draws with chance 1/4: a deviation of 10.6, so five of them are 53.
    assert ((drawn - 150).abs() < 53).all()


def test_the_groups_of_a_sampled_row_stay_together():
    values = torch.arange(30.0).reshape(1, 30, 1) + torch.tensor([0.0, 100.0]).reshape(2, 1, 1)
    reservoir = Reservoir(5, seed=0)
    for part in values.split(12, dim=1):
        reservoir.offer(part)
    assert reservoir.rows.shape == (2, 5, 1)
    assert (reservoir.rows[1] - reservoir.rows[0] == 100).all()


def test_a_kept_sample_does_not_hold_on_to_the_batch():
    reservoir = Reservoir(4, seed=0)
    rows = torch.zeros(4, 3)
    reservoir.offer(rows)
    rows += 1
    assert (reservoir.rows == 0).all()
    reservoir.offer(torch.zeros(1000, 3))
    assert reservoir.rows.untyped_storage().nbytes() == 4 * 3 * 4


class Waits(TorchDispatchMode):
    """Counts what makes the CPU wait for a GPU to know how many rows there are."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indexed = args[1] if func is torch.ops.aten.index.Tensor else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indexed)
        self.count += by_mask or func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 3])
def test_what_a_mask_counts_is_found_once_a_batch_for_all_layers(layers):
    model = decoder("llama", blocks=3)
    data = [padded(sentences((4, 6, 5), seed)) for seed in range(2)]
    names = [f"model.layers.{place}.mlp.down_proj" for place in range(layers)]
    known = collect(model, data, names)
    with Waits() as waits:
        collect(model, data, known)
    assert waits.count == len(data)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6), st.data())
def test_the_places_of_what_counts_are_those_of_the_mask(mask, data):
    mask = torch.tensor(mask)
    start, stop = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(mask))])))
    counting = Counting.of(mask)
    expected = [place for place, counts in enumerate(mask[start:stop].flatten().tolist()) if counts]
    assert counting.rows(slice(start, stop), 4).tolist() == expected
    assert counting.rows(slice(4 * start, 4 * stop), 1).tolist() == expected, "as rows of single tokens"
    assert counting.rows(slice(start, stop + 9), 4).tolist()[: len(expected)] == expected
    assert counting.rows(slice(None), 4).tolist() == mask.flatten().nonzero()[:, 0].tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["by shift", "unfolded", "grouped", "depthwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_channels_last_images_count_on_a_gpu_as_on_the_cpu(kind, dtype):
    module, shape = LAYERS[kind]
    inputs, labels = samples(shape, [0, 1, 1, 2, 0, 1, 3])
    batches = batched((inputs.to(dtype), labels), 4)
    there = [(images.cuda().to(memory_format=torch.channels_last), labels.cuda()) for images, labels in batches]
    here = [(images.float(), labels) for images, labels in batches]
    for options in ({}, {"full": True}):
        found, expected = accumulate(module, there, **options).to("cpu"), accumulate(module, here, **options)
        assert_same_statistics(found, expected, rtol=1e-5, atol=1e-3)
