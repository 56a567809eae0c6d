"""What the samplers of the processes' loaders give: the same samples to all of them, or to each its own."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unmerge.data.batches import length_of
from unmerge.distributed.processes import exchange, gathered
from unmerge.errors import DataError, listing

Batches = list[list[Any]]  # the indices of the samples of each batch
_PASSES = 10  # times as many as are expected: a sampler that gives more does not end


@contextmanager
def one_seed(*generators: torch.Generator) -> Iterator[None]:
    """Inside the block every process draws the same numbers; afterwards it goes on as if it had drawn none."""
    before = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            for generator in generators:
                generator.manual_seed(0)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        for generator, state in zip(generators, before[2], strict=True):
            generator.set_state(state)


def listed(batch_sampler: Iterable[Any], samples: int, what: str) -> Batches:
    """All that the sampler of a dataset of so many samples gives; an error where it does not end."""
    length, found, count = length_of(batch_sampler), [], 0
    for indices in batch_sampler:
        found.append(list(indices))
        count += len(found[-1])
        if (count > _PASSES * samples) if length is None else (len(found) > _PASSES * length):
            raise DataError(
                f"{what}: the loader's sampler gave {count} indices of a dataset of {samples} samples and had not "
                "ended. Several processes need to know what is read: pass a loader whose sampler ends."
            )
    return found


def are_equal(value: Any) -> bool:
    """Whether every process has the same value, as its repr shows it."""
    return len(set(exchange(hashlib.sha256(repr(value).encode()).hexdigest()))) == 1


def are_apart(own: Batches, batch_sampler: Iterable[Any], samples: int, what: str) -> bool:
    """Whether each process's sampler gives samples that no other gives, and not the same to all.

    own: what the sampler gave in this process. Samples that overlap without being the same are an error.
    """
    if are_equal(_distinct(own)):
        return False
    # What is drawn at random, as with replacement, differs between processes, but not from one seed.
    with one_seed(*_generators(batch_sampler)):
        again = listed(batch_sampler, samples, what)
    can_be_listed_again = len(again) == len(own)
    if all(exchange(can_be_listed_again)) and are_equal(_distinct(again)):
        return False
    given = gathered(_distinct(own))
    times = Counter(index for indices in given for index in indices)
    shared = [index for index, count in times.items() if count > 1]
    if not shared:
        return True
    sizes = ", ".join(f"process {place} gets {len(indices)}" for place, indices in enumerate(given))
    raise DataError(
        f"{what}: the samplers neither give the same samples to all processes nor to each its own: {len(shared)} of "
        f"{len(times)} go to more than one process, such as index {listing(shared, 3)}, but not all to all ({sizes}). "
        "Pass every process the same loader, whose batches are then dealt out, or one with a DistributedSampler; where "
        "a sample is to count as often as it is given, unmerge.distributed.OwnShare(loader)."
    )


def _distinct(batches: Batches) -> list[str]:
    """The indices, which may be keys of any kind, each once and in order."""
    return sorted({str(index) for indices in batches for index in indices}, key=lambda index: (len(index), index))


def _generators(batch_sampler: Any) -> list[torch.Generator]:
    """The generators that a sampler draws from, where it names them as torch's samplers do."""
    parts = (batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(each): each for part in parts if isinstance(each := getattr(part, "generator", None), torch.Generator)}
    return list(found.values())
