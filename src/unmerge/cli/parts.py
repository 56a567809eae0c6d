"""Parts of a data source in batches: what is forgotten, what is retained, and samples of either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmerge.cli import images
from unmerge.data.batches import first_tensor, inputs_of, labels_of, select_samples
from unmerge.data.chosen import ChosenSamples
from unmerge.errors import DataError, listing

if TYPE_CHECKING:
    from PIL.Image import Image

LABELS = ("labels", "label", "targets", "y")
_HELD = 1 << 29  # bytes of a small part that is kept rather than read again


class Source:
    """Labelled samples by their place: what the kinds below fill in."""

    labels: Tensor | None = None
    names: dict[int, str]  # of classes
    identity: str | None = None  # a checksum of the data, where one can be had

    def __len__(self) -> int:
        raise NotImplementedError

    def inputs(self, places: Sequence[int]) -> Any:
        """The model's inputs at some places: a tensor, or a mapping of tensors."""
        raise NotImplementedError

    def picture(self, place: int) -> Image | None:
        return None

    def known_labels(self, described: str) -> Tensor:
        if self.labels is None:
            raise DataError(
                f"{described} has no labels, so --forget label=... finds nothing. Name them as one of "
                f"{listing(LABELS)}, or use --forget-ids."
            )
        return self.labels


class Part:
    """Some samples of a source in batches, as often as they are read, in an order that mixes the classes."""

    def __init__(self, source: Source, places: Sequence[int], size: int) -> None:
        self.source, self.size = source, size
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0)).tolist()
        self.places = [places[place] for place in order]

    @property
    def samples(self) -> int:
        return len(self.places)

    def __len__(self) -> int:
        return -(-len(self.places) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.places), self.size):
            yield self._batch(self.places[start : start + self.size])

    def _batch(self, places: list[int]) -> Any:
        inputs, labels = self.source.inputs(places), self.source.labels
        if labels is None:
            return inputs
        return {**inputs, "labels": labels[places]} if isinstance(inputs, Mapping) else (inputs, labels[places])


class Filtered:
    """The samples of a user's own loader that have, or have not, some labels."""

    samples: int | None = None  # not known before it is read

    def __init__(self, data: Iterable[Any], labels: Iterable[int], keep: bool) -> None:
        self._data, self._labels, self._keep = data, torch.tensor(sorted(labels)), keep

    def __iter__(self) -> Iterator[Any]:
        for batch in self._data:
            labels = labels_of(batch)
            if labels is None:
                raise DataError("the loader's batches have no labels, so --forget label=... finds nothing.")
            chosen = (torch.isin(labels.cpu(), self._labels) == self._keep).nonzero().flatten()
            if len(chosen):
                yield select_samples(batch, chosen)


def some_of(part: Any, limit: int, samples: int, seed: int = 0) -> Iterable[Any]:
    """A random sample of a part, held in memory where it is small."""
    if isinstance(part, Part):
        chosen: Any = Part(part.source, part.places[:limit], part.size)  # which are in random order
    elif samples <= limit:
        chosen = part
    else:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        chosen = ChosenSamples(part, order[:limit].tolist())
    held, size = [], 0
    for batch in chosen:
        held.append(batch)
        size += first_tensor(batch).nbytes
        if size > _HELD:
            return chosen
    return held


def pictures_of(part: Any, limit: int) -> tuple[Any, list[Image | None]]:
    """A few samples as one batch, with their pictures where they are images."""
    if isinstance(part, Part):
        few = Part(part.source, part.places[:limit], limit)
        return next(iter(few)), [part.source.picture(place) for place in few.places]
    batch = next(iter(part))
    inputs = inputs_of(batch)
    chosen = select_samples(batch, torch.arange(min(limit, len(first_tensor(batch)))))
    if isinstance(inputs, Mapping):
        return chosen, [None] * len(first_tensor(chosen))
    return chosen, [images.picture_of(image) for image in first_tensor(chosen)]


def batches_in(part: Any) -> int | None:
    return len(part) if isinstance(part, Sized) else None
