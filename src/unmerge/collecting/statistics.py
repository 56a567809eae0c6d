"""Statistics of a forward pass: what the method needs of data. Saved, loaded, added and subtracted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.collecting.arithmetic import combined
from unmerge.collecting.probe import Probe
from unmerge.collecting.statistics_file import STATISTICS, check_statistics, layer_of, tensors_of
from unmerge.distributed.processes import is_first
from unmerge.errors import FileError, StatisticsError, listing
from unmerge.storage.files import read_tensors, write_tensors
from unmerge.storage.fingerprint import differences
from unmerge.version import VERSION

KIND = "statistics"


@dataclass(eq=False, repr=False)
class Statistics:
    """The moments of every collected layer's inputs, and whose they are."""

    layers: dict[str, LayerStatistics]  # layers that share their input share the value
    samples: int
    weights: dict[str, str]  # a checksum for each parameter and buffer of the model
    classes: tuple[int, ...] = ()  # labels, in the order of the class tensors
    class_samples: tuple[int, ...] = ()
    head: str | None = None  # the layer whose output is the model's
    shift_to: dict[str, str | None] = field(default_factory=dict)  # the tensor that takes a constant shift
    left_out: dict[str, str] = field(default_factory=dict)
    counted: str | None = None  # which tokens, in the word of `data.batches.counted_by`; None where that is not known
    # What belongs to these very sums: statistics that are made of them start without it.
    parts: tuple[Statistics, Statistics] | None = field(default=None, init=False)  # (S, F), when this is S − F
    factors: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False)  # a cache

    def __getitem__(self, layer: str) -> LayerStatistics:
        if layer not in self.layers:
            raise StatisticsError(f"these statistics have no layer {layer!r}; they have {listing(self.layers)}.")
        return self.layers[layer]

    @property
    def probe(self) -> Probe:
        """What was seen of the layers, for another pass through the same weights."""
        first: dict[int, str] = {}
        leaders = {name: first.setdefault(id(layer), name) for name, layer in self.layers.items()}
        shared = {name: leader for name, leader in leaders.items() if leader != name}
        pivots = {name: layer.moments.pivot for name, layer in self.layers.items()}
        return Probe(set(self.layers), leader=shared, shift_to=dict(self.shift_to), head=self.head, pivots=pivots)

    def __repr__(self) -> str:
        classes = f", {len(self.classes)} classes" if self.classes else ""
        sketched = f", {len(self.sketches)} sketched" if self.sketches else ""
        devices = ", ".join(sorted({str(layer.device) for layer in self.layers.values()})) or "no device"
        return f"Statistics({len(self.layers)} layers{sketched}, {self.samples:,} samples{classes}, {devices})"

    def check_weights(self, weights: dict[str, str]) -> None:
        """Refuse a model other than the one that was read: its inputs depend on every weight before a layer."""
        changed = differences(weights, self.weights)
        if changed:
            raise StatisticsError(
                f"these statistics were collected with other weights: {changed[0]!r} differs"
                + (f" (and {len(changed) - 1} more). " if len(changed) > 1 else ". ")
                + "Collect them again with this model, or revert the edit that it carries."
            )

    def __add__(self, other: Statistics) -> Statistics:
        self.check_alike(other, "add")
        classes = tuple(sorted({*self.classes, *other.classes}))
        return combined(self, other, classes, +1)

    def __sub__(self, other: Statistics) -> Statistics:
        """S − F: the statistics of the samples of S that are not in F, without reading them."""
        self.check_alike(other, "subtract")
        if other.samples >= self.samples:
            raise StatisticsError(f"cannot take {other.samples} samples out of {self.samples}.")
        mine = dict(zip(self.classes, self.class_samples, strict=True))
        for label, count in zip(other.classes, other.class_samples, strict=True):
            if self.classes and count > mine.get(label, 0):
                raise StatisticsError(
                    f"cannot take {count} samples of class {label} out of {mine.get(label, 0)}: "
                    "the second statistics are not part of the first."
                )
        classes = self.classes if other.classes or not self.classes else ()
        rest = combined(self, other, classes, -1)
        rest.parts = (self, other)
        return rest

    def only(self, *layers: str) -> Statistics:
        """The same statistics of some layers."""
        return dataclasses.replace(self, layers={layer: self[layer] for layer in layers})

    def leaving_out(self, reasons: Mapping[str, str]) -> Statistics:
        """The same statistics without some layers, which are noted with the reason."""
        if not reasons:
            return self
        kept = [name for name in self.layers if name not in reasons]
        shift_to = {name: to for name, to in self.shift_to.items() if name not in reasons}
        return dataclasses.replace(self.only(*kept), shift_to=shift_to, left_out={**self.left_out, **reasons})

    def without_classes(self) -> Statistics:
        """The same statistics without what is kept by label."""
        layers = _once_each(self.layers, lambda layer: LayerStatistics(layer.moments))
        return dataclasses.replace(self, layers=layers, classes=(), class_samples=())

    @property
    def sketches(self) -> dict[str, int]:
        """The layers whose Gram was too large, and the size of the sketch in its place."""
        return {name: layer.sketch for name, layer in self.layers.items() if layer.sketch is not None}

    def sketched(self, sizes: Mapping[str, int]) -> Statistics:
        """The same statistics with some layers sketched, each to at most a size."""
        known = self.sketches
        smaller = {name: size for name, size in sizes.items() if size < known.get(name, size + 1)}
        if not smaller:
            return self
        made = {(id(self[name]), size): self[name] for name, size in smaller.items()}
        made = {key: layer.sketched(key[1]) for key, layer in made.items()}
        layers = self.layers | {name: made[id(self[name]), size] for name, size in smaller.items()}
        return dataclasses.replace(self, layers=layers)

    def to(self, device: torch.device | str) -> Statistics:
        """The same statistics on another device."""
        return self.at(dict.fromkeys(self.layers, torch.device(device)))

    def at(self, devices: Mapping[str, torch.device]) -> Statistics:
        """The same statistics with each layer on a device of its own, as those of a model on several devices are."""
        if all(layer.device == devices[name] for name, layer in self.layers.items()):
            return self
        # Layers that share their value share it afterwards too, where they share the device.
        moved = {(id(layer), devices[name]): layer for name, layer in self.layers.items()}
        moved = {place: layer.to(place[1]) for place, layer in moved.items()}
        layers = {name: moved[id(layer), devices[name]] for name, layer in self.layers.items()}
        return dataclasses.replace(self, layers=layers)

    def beside(self, other: Statistics) -> Statistics:
        """The same statistics with each layer where the other's is."""
        return self.at({name: layer.device for name, layer in other.layers.items()})

    def save(self, path: str | Path, shard: Mapping[str, Any] | None = None) -> None:
        """Write one safetensors file; shared layers are written once, and of several processes the first writes.

        shard: which share of which data it is of, as plain values: see `merging`.
        """
        if not is_first():
            return
        tensors: dict[str, Tensor] = {}
        leaders: dict[int, str] = {}
        header: dict[str, Any] = {
            "version": VERSION,
            **{name: getattr(self, name) for name in STATISTICS},
            "shard": None if shard is None else dict(shard),
            "layers": {},
        }
        for name, layer in self.layers.items():
            leader = leaders.setdefault(id(layer), name)
            header["layers"][name] = {"same_as": leader}
            if leader == name:
                rows = {code: moments.n for code, moments in layer.class_moments.items()}
                header["layers"][name] = {"rows": layer.moments.n, "class_moments": rows}
                tensors.update({f"{name}:{key}": value for key, value in tensors_of(layer).items()})
        write_tensors(Path(path), tensors, KIND, header)

    @staticmethod
    def merge(paths: Iterable[str | Path]) -> Statistics:
        """The statistics of all the data, from the files of its shards (`unmerge collect --shard I/N`)."""
        from unmerge.collecting.merging import merge

        return merge(paths)[0]

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Statistics:
        """Read what `save` wrote; a damaged or changed file is an error."""
        tensors, header = read_tensors(Path(path), KIND, device)
        layers: dict[str, LayerStatistics] = {}
        try:
            header = {"counted": None, **header}  # it was not always written
            check_statistics(header)
            for name, entry in header["layers"].items():
                if "same_as" in entry:
                    layers[name] = layers[entry["same_as"]]
                    continue
                prefix = f"{name}:"
                own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                layers[name] = layer_of(own, entry, len(header["classes"]))
            values = {name: header[name] for name in STATISTICS}
            values |= {name: tuple(values[name]) for name in ("classes", "class_samples")}
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} was written by another version of unmerge: {error!r}.") from error
        return cls(layers, **values)

    def check_alike(self, other: Statistics, verb: str) -> None:
        if not isinstance(other, Statistics):
            raise TypeError(f"cannot {verb} {type(other).__name__} and Statistics.")
        mine, theirs = set(self.layers), set(other.layers)
        if mine != theirs:
            raise StatisticsError(
                f"cannot {verb} statistics of different layers: {listing(sorted(mine ^ theirs))} stand on one side "
                "only. Pass layers=statistics, the first ones, to the second collect."
            )
        changed = differences(other.weights, self.weights)
        if changed:
            raise StatisticsError(f"cannot {verb} statistics of different weights: {changed[0]!r} differs.")
        if None not in (self.counted, other.counted) and self.counted != other.counted:
            raise StatisticsError(
                f"cannot {verb} statistics of different tokens: {self.counted!r} are counted in the one and "
                f"{other.counted!r} in the other. Pass the same mask= to both."
            )
        if verb == "add" and bool(self.classes) != bool(other.classes):
            raise StatisticsError("cannot add statistics with labels and statistics without.")


def joined(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of different layers over the same data as one."""
    return dataclasses.replace(
        parts[0],
        layers={name: layer for part in parts for name, layer in part.layers.items()},
        head=next((part.head for part in parts if part.head is not None), None),
        shift_to={name: to for part in parts for name, to in part.shift_to.items()},
        left_out={name: reason for part in parts for name, reason in part.left_out.items()},
    )


def _once_each(
    layers: dict[str, LayerStatistics], change: Callable[[LayerStatistics], LayerStatistics]
) -> dict[str, LayerStatistics]:
    distinct = {id(layer): layer for layer in layers.values()}
    changed = {key: change(layer) for key, layer in distinct.items()}
    return {name: changed[id(layer)] for name, layer in layers.items()}
