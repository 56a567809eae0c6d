"""What a sampler gives is listed to its end, and numbers drawn from one seed leave no trace.

What several processes make of it is in tests/distributed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from unmerge.data.samplers import listed, one_seed
from unmerge.errors import DataError


class Endless(Sampler[int]):
    """Repeats five samples."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(5))


class SaidToEnd(Endless):
    def __len__(self) -> int:
        return 5


def draws(generator: torch.Generator) -> list[float]:
    drawn = torch.rand(1).item(), torch.rand(1, generator=generator).item(), random.random(), np.random.rand()
    return list(drawn)


def test_one_seed_gives_the_same_numbers_and_leaves_the_others_as_they_were() -> None:
    generator, same = torch.Generator().manual_seed(7), []
    for seed in (1, 2):
        for start in (torch.manual_seed, random.seed, np.random.seed, generator.manual_seed):
            start(seed)
        expected = draws(generator)
        for start in (torch.manual_seed, random.seed, np.random.seed, generator.manual_seed):
            start(seed)
        with one_seed(generator):
            same.append(draws(generator))
        assert draws(generator) == expected
    assert same[0] == same[1]


@pytest.mark.parametrize("sampler", [Endless(), SaidToEnd()])
def test_a_sampler_that_does_not_end_is_refused(sampler: Sampler[int]) -> None:
    with pytest.raises(DataError, match=r"retain: .* of a dataset of 5 samples and had not ended"):
        listed(BatchSampler(sampler, 2, drop_last=False), 5, "retain")


def test_one_that_gives_a_sample_many_times_is_not() -> None:
    often = RandomSampler(range(5), replacement=True, num_samples=1000)  # type: ignore[arg-type]
    found = listed(BatchSampler(often, 3, drop_last=False), 5, "retain")
    assert [len(batch) for batch in found] == [3] * 333 + [1]
