"""Which batches are this process's share of the data, so that each sample is counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from unmerge.data.batches import check_iterable, first_samples, first_tensor, map_tensors
from unmerge.data.chosen import ChosenSamples
from unmerge.data.samplers import Batches, are_apart, are_equal, listed, one_seed
from unmerge.data.shares import ChosenShare, EveryOther, GivenShare, Piece, Share, not_the_same
from unmerge.distributed.processes import OwnShare, agreed, exchange, rank, same_everywhere, size
from unmerge.errors import DataError, RankError
from unmerge.storage.fingerprint import fingerprint

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
_COMPARED = 6  # samples


def share_of(data: Any, what: str) -> Share:
    """This process's share of what every process was given, or of what each was given a share of."""
    check_iterable(data, what)
    if isinstance(data, ChosenSamples):
        return ChosenShare(share_of(data.data, what), data)
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
    return EveryOther(data, what) if batch_sampler is None else _looked_up(data, batch_sampler, what)


def _looked_up(loader: DataLoader[Any], batch_sampler: Iterable[Any], what: str) -> Share:
    """The share of a loader whose sampler gives the same samples to all processes, or to each its own."""
    dataset: Any = loader.dataset
    samples = agreed(len(dataset), f"{what}: the processes' datasets have different lengths")
    batches = listed(batch_sampler, samples, what)
    if are_equal(batches):  # as of a loader that does not shuffle: the quick way
        return DealtShare(loader, batches, what)
    if are_apart(batches, batch_sampler, samples, what):
        return GivenShare(_loader_of(loader, batches))
    # The order is drawn by the first process, so that a loader may shuffle.
    return DealtShare(loader, same_everywhere(batches), what)


def _loader_of(loader: DataLoader[Any], batches: Batches) -> DataLoader[Any]:
    """A loader that looks other batches up in the same way."""
    options = {name: getattr(loader, name) for name in _FORWARDED}
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


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
    if type(loader).__name__ == "DataLoaderShard" and not isinstance(loader.dataset, IterableDataset):
        return sampler.batch_sampler if type(sampler).__name__ == "BatchSamplerShard" else sampler
    raise DataError(
        f"{what}: accelerate prepared this loader as a {type(loader).__name__} of an iterable dataset, which repeats "
        "samples to make the processes' shares even. Pass the loader from before accelerator.prepare(...)."
    )


class DealtShare(Share):
    """Every n-th batch of a loader that looks its samples up: the others are not even loaded."""

    def __init__(self, loader: DataLoader[Any], batches: Batches, what: str) -> None:
        self._loader, self._batches = loader, batches
        _check_alike(loader, [index for indices in batches for index in indices], what)

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        starts = [0]
        for indices in self._batches:
            starts.append(starts[-1] + len(indices))
        numbers = range(len(self._batches)) if whole else range(rank(), len(self._batches), size())
        if not numbers:
            return
        loader = _loader_of(self._loader, [self._batches[number] for number in numbers])
        for number, batch in zip(numbers, loader, strict=True):
            yield Piece(batch, number, starts[number])

    def __len__(self) -> int:
        return len(range(rank(), len(self._batches), size()))


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
        places = exchange(f"{sampler.rank} of {sampler.num_replicas}")
        if sorted(places) != sorted(f"{place} of {size()}" for place in range(size())):
            raise RankError(
                f"{what}: the DistributedSamplers are {', '.join(places)}, but there are {size()} processes; make them "
                "after the processes have joined."
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


def _check_alike(loader: DataLoader[Any], indices: list[Any], what: str) -> None:
    """Refuse datasets of which a few samples are not the same in every process."""
    step = max(1, len(indices) // _COMPARED)
    chosen = indices[::step]
    first, again = (_checksums(loader, chosen) for _ in range(2))
    # Samples that are drawn anew each time cannot be compared.
    found = [checksums for checksums in exchange(first if first == again else None) if checksums is not None]
    if any(checksums != found[0] for checksums in found):
        raise not_the_same(what)


def _checksums(loader: DataLoader[Any], indices: list[Any]) -> list[str]:
    """Checksums of some samples, their augmentation drawn from one seed."""
    dataset: Any = loader.dataset
    collate: Any = loader.collate_fn
    tensors: dict[str, Tensor] = {}
    with one_seed():
        for index in indices:
            batch = collate([dataset[index]])
            map_tensors(batch, lambda tensor: tensors.setdefault(str(len(tensors)), tensor))
    return list(fingerprint(tensors).values())
