"""The labelled samples of a request, read once and held as one batch, so that any of them can be drawn together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.options import check_count, check_name
from unmerge.data.batches import (
    PROBE_SAMPLES,
    Forward,
    batches,
    classifier_logits,
    device_of,
    feed,
    first_samples,
    inputs_of,
    labels_of,
    map_tensors,
    on_device,
)
from unmerge.errors import DataError, listing
from unmerge.model.evaluating import evaluating

Data = Iterable[Any]
Augment = Callable[[Any], Any]


@dataclass(frozen=True)
class Samples:
    """Forget samples, then retain samples, in the form of the batches that they came in."""

    whole: Any  # one batch with all of them
    labels: Tensor
    forget_count: int
    classes: int  # that the model tells apart
    device: torch.device  # of the model

    @property
    def forget(self) -> Tensor:
        """The places of the forget samples."""
        return torch.arange(self.forget_count)

    @property
    def retain(self) -> Tensor:
        """The places of the retain samples."""
        return torch.arange(self.forget_count, len(self.labels))

    def take(self, chosen: Tensor, augment: Augment | None = None) -> tuple[Any, Tensor]:
        """A batch of the chosen samples and their labels, on the model's device."""
        batch, labels = _rows(self.whole, len(self.labels), chosen), self.labels[chosen]
        if labels.device != self.device:
            batch, labels = map_tensors((batch, labels), lambda tensor: tensor.to(self.device, non_blocking=True))
        return (batch if augment is None else _augmented(batch, augment)), labels

    def batches(self, places: Tensor, size: int) -> list[Tensor]:
        """The places in order, in batches."""
        return chunks(places.to(self.labels.device), size)

    def shuffled(self, places: Tensor, size: int, generator: torch.Generator, count: int | None = None) -> list[Tensor]:
        """The places in random order, in batches; with `count` so many, going round again where there are fewer."""
        count = len(places) if count is None else count
        rounds = -(-count // len(places))
        order = torch.cat([torch.randperm(len(places), generator=generator) for _ in range(rounds)])[:count]
        # Moved once an epoch: a copy for every batch would wait for the device.
        return self.batches(places[order], size)

    def relabelled(self, labels: Tensor) -> Samples:
        """The same samples with other labels for the first ones."""
        changed = self.labels.clone()
        changed[: len(labels)] = labels.to(changed)
        return replace(self, labels=changed)


def gather(
    model: nn.Module,
    forget: Data | None = None,
    retain: Data | None = None,
    *,
    forward: Forward | None = None,
    hold: str = "device",
    forget_limit: int | None = None,
    retain_limit: int | None = None,
    seed: int = 0,
) -> Samples:
    """All samples of the pools that are given, read once.

    They take the memory of all samples (twice that while they are joined), on the model's device or, with
    hold="cpu", in host memory, from where each batch is then moved. A limit keeps that many, drawn at random, and
    takes memory for about twice as many. Of a batch, what is no tensor is taken from the first one.
    """
    check_name("hold", hold, ("device", "cpu"))
    generator = torch.Generator().manual_seed(seed)
    device = device_of(model) if hold == "device" else torch.device("cpu")
    parts: list[Any] = []
    counts: list[int] = []
    for what, data, limit in (("forget", forget, forget_limit), ("retain", retain, retain_limit)):
        if limit is not None:
            check_count("a limit of samples", limit, 1)
        pool = [] if data is None else _read(data, what, device, limit, generator)
        parts += pool
        counts.append(sum(len(labels_in(batch, what)) for batch in pool))
    sizes = [len(labels_in(batch, "the data")) for batch in parts]
    whole = _joined(parts, sizes)
    labels = labels_in(whole, "the data").long()
    classes = class_count(model, parts[0], forward)
    check_labels(labels, classes)
    return Samples(whole, labels, counts[0], classes, device_of(model))


def chunks(places: Tensor, size: int) -> list[Tensor]:
    """Batches of `size`; a last one of a single sample joins the one before, as BatchNorm cannot train on it alone."""
    parts = list(places.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def class_count(model: nn.Module, batch: Any, forward: Forward | None) -> int:
    """How many classes the model tells apart: the width of its logits for a few samples."""
    with evaluating(model):
        return classifier_logits(feed(model, on_device(model, first_samples(batch, PROBE_SAMPLES)), forward)).shape[1]


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that the model has no output for."""
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise DataError(
            f"the labels {listing(map(str, outside.unique().tolist()))} are outside 0 to {classes - 1}: the model "
            f"returns {classes} logits."
        )


def labels_in(batch: Any, what: str) -> Tensor:
    """The class labels of a batch, which must have them."""
    labels = labels_of(batch)
    if labels is None:
        raise DataError(
            f"{what}: a batch of type {type(batch).__name__} has no class labels. Expected (inputs, labels), or a "
            "mapping with 'labels': a 1-D integer tensor with one entry a sample."
        )
    return labels


def _read(data: Data, what: str, device: torch.device, limit: int | None, generator: torch.Generator) -> list[Any]:
    """The batches of a pool on a device; with a limit, those samples whose random keys are the smallest."""
    kept: list[Any] = []
    keys: list[Tensor] = []
    for batch in batches(data, what):
        count = len(labels_in(batch, what))
        if count == 0:
            continue
        kept.append(map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True)))
        if limit is not None:
            keys.append(torch.rand(count, generator=generator, dtype=torch.float64))
            if sum(map(len, keys)) > 2 * limit:
                kept, keys = _smallest(kept, keys, limit)
    if not kept:
        raise DataError(f"{what}: the batches hold no sample. Expected at least one.")
    return kept if limit is None else _smallest(kept, keys, limit)[0]


def _smallest(parts: list[Any], keys: list[Tensor], limit: int) -> tuple[list[Any], list[Tensor]]:
    """The samples of the batches with the `limit` smallest keys."""
    every = torch.cat(keys)
    if len(every) <= limit:
        return parts, keys
    highest = every.kthvalue(limit).values
    chosen = [(key <= highest).nonzero().squeeze(1) for key in keys]
    left = [(_rows(part, len(key), rows), key[rows]) for part, key, rows in zip(parts, keys, chosen, strict=True)]
    left = [(part, key) for part, key in left if len(key)]
    return [part for part, _ in left], [key for _, key in left]


def _rows(batch: Any, count: int, chosen: Tensor) -> Any:
    """Some samples of a batch of `count`."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor[chosen.to(tensor.device)] if tensor.dim() and len(tensor) == count else tensor

    return map_tensors(batch, rows)


def _augmented(batch: Any, augment: Augment) -> Any:
    inputs = augment(inputs_of(batch))
    if isinstance(batch, Mapping):
        return {**batch, **inputs}
    return (inputs, *batch[1:])


def _joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Batches as one: their tensors joined, anything else from the first."""
    first = parts[0]
    if isinstance(first, Tensor):
        if any(part.dim() == 0 or len(part) != size for part, size in zip(parts, sizes, strict=True)):
            return first
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            found = " and ".join(str(shape) for shape in sorted(shapes)[:2])
            raise DataError(
                f"samples of shapes {found} cannot be drawn into one batch. Resize or pad them to one shape."
            )
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        if any(not isinstance(part, Mapping) or part.keys() != first.keys() for part in parts):
            raise DataError("the batches have different entries; expected the same in all, of forget and retain.")
        return {key: _joined([part[key] for part in parts], sizes) for key in first}
    if isinstance(first, (tuple, list)) and any(isinstance(entry, (Tensor, Mapping)) for entry in first):
        if any(type(part) is not type(first) or len(part) != len(first) for part in parts):
            raise DataError("the batches have different entries; expected the same in all, of forget and retain.")
        entries = [_joined(column, sizes) for column in zip(*parts, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    return first
