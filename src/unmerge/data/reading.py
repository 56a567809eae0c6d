"""A pass over data: by this process alone, or over its share of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from unmerge.data.batches import (
    PROBE_SAMPLES,
    Forward,
    batches,
    feed,
    first_samples,
    first_tensor,
    length_of,
    map_tensors,
    no_batch,
    on_device,
    progress,
)
from unmerge.data.dealing import share_of
from unmerge.data.shares import Piece, Share
from unmerge.distributed.processes import exchange, from_first, gathered, size
from unmerge.errors import DataError
from unmerge.placement.sharded import check_model, is_sharded


class Reading:
    """The batches that this process feeds to a model in one pass over `data`.

    whole: every process reads all batches, in one order. samples: only the batches that begin before so many samples.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Any],
        what: str,
        forward: Forward | None = None,
        whole: bool = False,
        samples: int | None = None,
    ) -> None:
        self._model, self._what, self._forward, self._samples = model, what, forward, samples
        self._share: Share | None = None
        self._few: Any = None
        if size() == 1:
            self._pieces = _until(_all_pieces(data, what), samples)
            return
        check_model(model)
        self._share = share_of(data, what)
        if whole and not self._share.is_whole_here:
            raise DataError(
                f"{what}: the first rows of the data have to be read in order, but each process was given a share of "
                "the data alone. Pass every process the same loader, without a DistributedSampler or one like it."
            )
        pieces = progress(self._share.pieces(whole), what, None if whole else length_of(self._share))
        self._pieces = _until(pieces, samples)

    @property
    def few(self) -> Any:
        """The first samples of all, the same in every process."""
        if self._few is None:
            first = next(self._pieces, None)
            own = None if first is None else first_samples(first.batch, PROBE_SAMPLES)
            if first is not None:
                self._pieces = chain(iter([first]), self._pieces)  # an iterator lets go of what it has given
            self._few = own if self._share is None else from_first(_plain(own))
            if self._few is None:
                raise no_batch(self._what)
        return self._few

    def __iter__(self) -> Iterator[Piece]:
        count = 0
        for piece in self._in_step() if self._share is not None and is_sharded(self._model) else self._pieces:
            yield piece
            count += 1
        if self._share is not None and not any(exchange(count)):
            raise no_batch(self._what)
        if self._share is not None and self._samples is None:
            self._share.check()

    def _in_step(self) -> Iterator[Piece]:
        """The pieces for a model whose weights are spread over the processes: each pass needs all of them."""
        filler = self.few
        while any(exchange((piece := next(self._pieces, None)) is not None)):
            if piece is not None:
                yield piece
            else:
                feed(self._model, on_device(self._model, filler), self._forward)


def all_batches(data: Iterable[Any], what: str) -> list[Any]:
    """Every batch of all processes, in each of them."""
    if size() == 1:
        return list(batches(data, what))
    share = share_of(data, what)
    found = [piece.batch for piece in share.pieces(whole=True)]
    share.check()
    everything = found if share.is_whole_here else list(chain.from_iterable(gathered(_plain(found))))
    if not everything:
        raise no_batch(what)
    return everything


def _all_pieces(data: Iterable[Any], what: str) -> Iterator[Piece]:
    start = 0
    for number, batch in enumerate(batches(data, what)):
        yield Piece(batch, number, start)
        start += len(first_tensor(batch))


def _until(pieces: Iterable[Piece], samples: int | None) -> Iterator[Piece]:
    """The pieces that begin before so many samples."""
    for piece in pieces:
        if samples is not None and piece.start >= samples:
            return
        yield piece
        if samples is not None and piece.start + len(first_tensor(piece.batch)) >= samples:
            return  # before a batch is loaded that is not wanted


def _plain(batch: Any) -> Any:
    """The batch as it travels between processes."""
    return map_tensors(batch, Tensor.cpu)
