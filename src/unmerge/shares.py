"""Which batches are this process's share of the data, so that each sample is counted once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from unmerge.batches import ChosenSamples, check_iterable, first_samples, first_tensor, select_samples
from unmerge.distributed import OwnShare, agreed, exchange, from_first, is_first, rank, size
from unmerge.errors import DataError, RankError
from unmerge.fingerprint import fingerprint

_FORWARDED = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "generator",
)
_ACCELERATE = "accelerate.data_loader"


@dataclass(frozen=True)
class Piece:
    """A batch with its place among the batches of all processes, and that of its first sample among all samples."""

    batch: Any
    number: int
    start: int


class Share:
    """This process's part of some data; `pieces()` is read once, `check()` follows in all processes."""

    is_whole_here = True  # whether this process could read all of the data

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        """The pieces of this share, or those of all shares."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise TypeError

    def check(self) -> None:
        """Refuse data of which a sample was counted twice or not at all."""


def share_of(data: Any, what: str) -> Share:
    """This process's share of what every process was given, or of what each was given a share of."""
    check_iterable(data, what)
    if isinstance(data, ChosenSamples):
        return ChosenShare(share_of(data.data, what), data.places)
    batch_sampler = _batch_sampler(data, what) if isinstance(data, DataLoader) else None
    samplers = (getattr(part, "sampler", None) for part in (data, batch_sampler))
    sampler = next((found for found in samplers if isinstance(found, DistributedSampler)), None)
    if isinstance(data, OwnShare):
        kind = "its own share"
    elif sampler is not None:
        kind = "a loader with a DistributedSampler"
    else:
        kind = "batches" if batch_sampler is None else "a loader"
    agreed(kind, f"{what}: the processes were given data of different kinds")
    if isinstance(data, OwnShare):
        return GivenShare(data.data)
    if sampler is not None:
        return SampledShare(data, sampler, what)
    return EveryOther(data, what) if batch_sampler is None else DealtShare(data, batch_sampler, what)


def _batch_sampler(loader: DataLoader[Any], what: str) -> Any:
    """What says which samples make a batch of the loader, where batches are samples that are looked up."""
    if type(loader).__module__ == _ACCELERATE:
        return _before_accelerate(loader, what)
    # A loader with an iteration of its own may do more than look samples up.
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.batch_sampler


def _before_accelerate(loader: Any, what: str) -> Any:
    """The batch sampler that accelerate deals out, without the samples that it repeats to make the shares even."""
    sampler = loader.batch_sampler
    if type(loader).__name__ == "DataLoaderShard" and sampler is not None:
        if type(sampler).__name__ != "BatchSamplerShard":
            return sampler
        return sampler.batch_sampler
    raise DataError(
        f"{what}: accelerate prepared this loader as a {type(loader).__name__} of an iterable dataset, which repeats "
        "samples to make the processes' shares even. Pass the loader from before accelerator.prepare(...)."
    )


class DealtShare(Share):
    """Every n-th batch of a loader that looks its samples up: the others are not even loaded.

    The order is drawn by the first process, so that a loader may shuffle.
    """

    def __init__(self, loader: DataLoader[Any], batch_sampler: Iterable[Any], what: str) -> None:
        self._loader = loader
        dataset: Any = loader.dataset
        agreed(len(dataset), f"{what}: the processes' datasets have different lengths")
        found = from_first([list(indices) for indices in batch_sampler] if is_first() else None)
        self._batches: list[list[Any]] = found or []

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        starts = [0]
        for indices in self._batches:
            starts.append(starts[-1] + len(indices))
        numbers = range(len(self._batches)) if whole else range(rank(), len(self._batches), size())
        if not numbers:
            return
        options = {name: getattr(self._loader, name) for name in _FORWARDED}
        chosen = [self._batches[number] for number in numbers]
        loader: DataLoader[Any] = DataLoader(self._loader.dataset, batch_sampler=chosen, **options)
        for number, batch in zip(numbers, loader, strict=True):
            yield Piece(batch, number, starts[number])

    def __len__(self) -> int:
        return len(range(rank(), len(self._batches), size()))


class EveryOther(Share):
    """Every n-th batch of an iterable that gives the same batches to every process."""

    def __init__(self, data: Iterable[Any], what: str) -> None:
        self._data, self._what = data, what
        self._seen = (0, 0)  # batches, and a checksum of their sizes and first samples

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        start = 0
        for number, batch in enumerate(self._data):
            count = len(first_tensor(batch))
            first = fingerprint({"": first_tensor(batch)[:1]})[""]
            self._seen = (number + 1, zlib.crc32(f"{count} {first}".encode(), self._seen[1]))
            if whole or number % size() == rank():
                yield Piece(batch, number, start)
            start += count

    def __len__(self) -> int:
        if not isinstance(self._data, Sized):
            raise TypeError
        return len(range(rank(), len(self._data), size()))

    def check(self) -> None:
        if len({tuple(seen) for seen in exchange(self._seen)}) > 1:
            raise RankError(
                f"{self._what}: the processes do not see the same batches in the same order, so some samples would be "
                "counted twice and some never. Give every process the same data (shuffled with one seed), or, where "
                "each has samples of its own, unmerge.distributed.OwnShare(data)."
            )


class GivenShare(Share):
    """Batches that were dealt out before."""

    is_whole_here = False

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        count = 0
        for place, batch in enumerate(self._data):
            yield Piece(batch, place * size() + rank(), count * size())
            count += len(first_tensor(batch))

    def __len__(self) -> int:
        if not isinstance(self._data, Sized):
            raise TypeError
        return len(self._data)


class SampledShare(GivenShare):
    """What a DistributedSampler dealt out, without the samples that it repeats to make the shares even."""

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any], what: str) -> None:
        super().__init__(loader)
        self._what, self._count = what, 0
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            raise DataError(
                f"{what}: {type(sampler).__name__} deals samples out in a way of its own. If it repeats none, pass "
                "unmerge.distributed.OwnShare(loader); otherwise pass every process a loader without it."
            )
        dataset: Any = sampler.dataset
        self._samples = len(dataset)
        places = exchange(sampler.rank)
        if sorted(places) != list(range(sampler.num_replicas)):
            raise RankError(
                f"{what}: the DistributedSamplers have the ranks {places} of {sampler.num_replicas}, but there are "
                f"{size()} processes; make them after the processes have joined."
            )
        order = [self._samples, sampler.shuffle, sampler.seed, sampler.epoch, sampler.drop_last]
        agreed(order, f"{what}: the DistributedSamplers differ in samples, shuffle, seed, epoch or drop_last")
        # Padding stands at the end of the order of all, of which this process has every n-th place.
        unpadded = len(range(sampler.rank, self._samples, sampler.num_replicas))
        self._quota = min(unpadded, sampler.num_samples)

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        self._count = 0
        for piece in super().pieces(whole):
            left, count = self._quota - self._count, len(first_tensor(piece.batch))
            if left > 0:
                self._count += min(left, count)
                yield piece if count <= left else replace(piece, batch=first_samples(piece.batch, left))

    def check(self) -> None:
        counted = sum(exchange(self._count))
        if counted > self._samples:
            raise RankError(f"{self._what}: {counted} samples were read of a dataset that has {self._samples}.")


class ChosenShare(Share):
    """The samples of a share that stand at some places among all samples."""

    def __init__(self, share: Share, places: Iterable[int]) -> None:
        self._share, self._places = share, set(places)
        self.is_whole_here = share.is_whole_here

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        offset = None
        if not self.is_whole_here:
            # Nobody knows how many samples the others have before they are counted.
            own = sum(len(first_tensor(piece.batch)) for piece in self._share.pieces())
            offset = sum(exchange(own)[: rank()])
        for piece in self._share.pieces(whole):
            count = len(first_tensor(piece.batch))
            start = piece.start if offset is None else offset
            chosen = [place for place in range(count) if start + place in self._places]
            offset = None if offset is None else offset + count
            if chosen:
                yield replace(piece, batch=select_samples(piece.batch, torch.tensor(chosen)))

    def check(self) -> None:
        self._share.check()
