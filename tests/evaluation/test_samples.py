"""Keys of samples: the same for the same bits, and an order that does not depend on how the data came."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from unmerge.evaluation.samples import alignment, draw_order, row_keys, shared


@given(st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float16, torch.uint8]))
def test_keys_do_not_depend_on_batches(size: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = (255 * torch.rand(size, 3, 5, generator=generator)).to(dtype)
    parts = torch.cat([row_keys(part) for part in images.split(7)])
    assert torch.equal(parts, row_keys(images))


def test_keys_tell_rows_apart() -> None:
    images = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0))
    assert len(row_keys(images).unique()) == 20_000
    assert row_keys(torch.tensor([[0.0, 1.0]])) != row_keys(torch.tensor([[1.0, 0.0]]))
    assert len(row_keys(torch.tensor([[True, False], [False, True]])).unique()) == 2


def test_keys_of_a_view_that_begins_between_words() -> None:
    flat = torch.arange(33, dtype=torch.uint8)
    assert torch.equal(row_keys(flat[1:].view(4, 8)), row_keys(flat[1:].clone().view(4, 8)))


def test_draw_order_depends_on_content_and_seed_only() -> None:
    keys = row_keys(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
    shuffled = keys[torch.randperm(50, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(keys[draw_order(keys, 3)], shuffled[draw_order(shuffled, 3)])
    assert not torch.equal(draw_order(keys, 3), draw_order(keys, 4))


def test_alignment_finds_the_order() -> None:
    keys = torch.tensor([5, 9, 9, 2])  # two inputs alike with different labels
    labels = torch.tensor([0, 1, 2, 0])
    order = torch.tensor([2, 3, 0, 1])
    found = alignment(keys[order], labels[order], keys, labels)
    assert found is not None
    assert torch.equal(keys[order][found], keys)
    assert torch.equal(labels[order][found], labels)
    assert alignment(keys, labels + 1, keys, labels) is None
    assert alignment(keys[:3], labels[:3], keys, labels) is None


def test_shared_counts_rows() -> None:
    assert shared(torch.tensor([1, 2, 2, 3]), torch.tensor([2, 4])) == 2
