"""The sample of a layer's rows depends on the data and the seed, not on who reads which batch."""

from __future__ import annotations

import pytest
import torch

from unmerge.sums.sampling import Reservoir

ROWS = torch.arange(120.0).reshape(60, 2)
BATCHES = ROWS.split([7, 1, 13, 20, 19])


def drawn(numbers: list[int], size: int, seed: int) -> Reservoir:
    reservoir = Reservoir(size, seed)
    for number in numbers:
        for part in BATCHES[number].split(4):  # a batch may come in pieces
            reservoir.offer(part, number)
    return reservoir


@pytest.mark.parametrize("size", [5, 16, 100])
def test_samples_of_shares_hold_that_of_all(size):
    whole = drawn([0, 1, 2, 3, 4], size, seed=3)
    shares = [drawn(numbers, size, seed=3) for numbers in ([0, 3], [1, 4], [2])]
    keys = torch.cat([share.drawn.keys for share in shares])
    rows = torch.cat([share.rows for share in shares])
    smallest = keys.argsort()[:size]
    assert rows[smallest].sort(0).values.equal(whole.rows.sort(0).values)


def test_places_are_in_the_order_of_the_data():
    whole = drawn([0, 1, 2, 3, 4], 16, seed=0)
    assert whole.drawn.places.diff().gt(0).all()
    assert whole.rows[:, 0].diff().gt(0).all()


def test_batches_and_seeds_draw_differently():
    keys = [drawn([number], 7, seed).drawn.keys for number in (0, 2) for seed in (0, 1)]
    assert len(torch.cat(keys).unique()) == sum(map(len, keys))
