"""A process's share of some batches, and the place of each batch and sample among all."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from unmerge.data.batches import first_tensor
from unmerge.data.chosen import ChosenSamples
from unmerge.distributed.processes import exchange, rank, size
from unmerge.errors import RankError
from unmerge.storage.fingerprint import fingerprint


@dataclass(frozen=True)
class Piece:
    """A batch with its place among the batches of all processes, and that of its first sample among all samples."""

    batch: Any
    number: int
    start: int


def not_the_same(what: str) -> RankError:
    return RankError(
        f"{what}: the processes do not see the same batches in the same order, so some samples would be counted twice "
        "and some never. Give every process the same data (shuffled with one seed), or, where each has samples of its "
        "own, unmerge.distributed.OwnShare(data)."
    )


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


class EveryOther(Share):
    """Every n-th batch of an iterable that gives the same batches to every process."""

    def __init__(self, data: Any, what: str) -> None:
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
        return len(range(rank(), len(self._data), size()))

    def check(self) -> None:
        if len({tuple(seen) for seen in exchange(self._seen)}) > 1:
            raise not_the_same(self._what)


class GivenShare(Share):
    """Batches that were dealt out before."""

    is_whole_here = False

    def __init__(self, data: Any) -> None:
        self._data = data

    def pieces(self, whole: bool = False) -> Iterator[Piece]:
        count = 0
        for place, batch in enumerate(self._data):
            yield Piece(batch, place * size() + rank(), count * size())
            count += len(first_tensor(batch))

    def __len__(self) -> int:
        return len(self._data)


class ChosenShare(Share):
    """The samples of a share that are among those chosen of all."""

    def __init__(self, share: Share, chosen: ChosenSamples) -> None:
        self._share, self._chosen = share, chosen
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
            offset = None if offset is None else offset + count
            for batch in self._chosen.among(piece.batch, start):
                yield replace(piece, batch=batch)

    def check(self) -> None:
        self._share.check()
