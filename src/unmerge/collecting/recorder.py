"""Recorder: the hooks of a pass, which turn each layer's inputs into statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.collecting.accumulation import Accumulator, Keep, LayerStatistics
from unmerge.collecting.batch_facts import BatchFacts, Counting
from unmerge.collecting.hooks import hooked
from unmerge.collecting.probe import Probe, identity, proves_itself
from unmerge.collecting.reduction import Counted, of_all
from unmerge.collecting.statistics import Statistics
from unmerge.collecting.stopping import LastBlock
from unmerge.data.batches import Forward, Mask, device_of, feed, first_tensor, labels_of, mask_of, on_device
from unmerge.distributed.processes import size as processes
from unmerge.errors import DataError, LayerError
from unmerge.model.experts import Routed, expert_modules, is_routed
from unmerge.model.layers import device_of_layer, layer_of
from unmerge.model.selection import Selection

_OWN_WAY = (
    "does not return input · weight + bias: its class {} does something of its own (pads, scales or fuses), so an edit "
    "would be wrong"
)
_MIXED = "does not have the samples in the first dimension of its input, so its rows cannot be given class labels"

_LOST = (
    "is an expert's whose inputs are not among those of the module that routes to it, so that its rows cannot be given "
    "class labels or a mask"
)


class Recorder:
    """Turns batches into statistics while its hooks are attached."""

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        seen: Probe,
        labelled: bool,
        keep: Keep,
        sketches: Mapping[str, int],
        dealt: bool = False,
    ) -> None:
        """dealt: the labels are not the data's own, so that a layer may do without them."""
        self._model = model
        self._probe = seen
        self._named = selection.named
        self._left_out = dict(selection.left_out)
        mixed = seen.mixed if labelled and not dealt else set()
        self._names = [
            name
            for name in selection.names
            if not self._refused(name, name in seen.disagrees, _OWN_WAY)
            and not self._refused(name, name in mixed, _MIXED)
        ]
        # Of layers that share their input the first that is kept stands for all.
        first: dict[str, str] = {}
        self._leader = {name: first.setdefault(seen.leader.get(name, name), name) for name in self._names}
        self._labelled = labelled
        # The sums of whole samples would not fit rows that end in the middle of one.
        self._by_class = labelled and (keep.full or keep.max_points is None)
        self._codes: dict[int, int] = {}
        self._class_samples: dict[int, int] = {}
        self._samples = 0
        self._is_checked = True  # whether all sums so far are known to be finite
        self._accumulators = {
            name: Accumulator(
                layer_of(model, name),
                self._by_class and name not in seen.mixed,
                keep,
                sketches.get(name),
                seen.pivots.get(name),
            )
            for name in first.values()
        }
        self._checked = set(seen.called)
        self._order: dict[str, None] = {}  # as called, so that the first broken layer can be named
        self._facts: BatchFacts | None = None
        self._calls: dict[str, int] = {}  # of each layer in this batch
        self._inputs: dict[str, list[tuple[object, ...]]] = {}  # of each layer or set of layers that share theirs
        self._leading = {leader for name, leader in self._leader.items() if leader != name}
        self._alive: list[Tensor] = []  # inputs that layers still to come share, so that their address stays theirs
        self._last_block = LastBlock(model, self._names)

    @property
    def is_full(self) -> bool:
        return all(accumulator.is_full for accumulator in self._accumulators.values())

    def read(self, batch: Any, mask: Mask, forward: Forward | None, number: int = 0) -> None:
        """Count one batch, which has this place in the data."""
        labels = labels_of(batch)  # before they move: reading them back would wait for the device
        batch = on_device(self._model, batch)
        if (labels is not None) != self._labelled:
            raise DataError("some batches have class labels and some have none; expected one label a sample in all.")
        size = len(first_tensor(batch))
        if size == 0:
            raise DataError("a batch holds no sample; leave empty batches out.")
        self._facts = replace(self._facts_of(size, labels, mask_of(batch, mask)), number=number)
        self._calls = dict.fromkeys(self._names, 0)
        self._inputs = {name: [] for name in self._accumulators}
        with hooked(self._model, self._names, self._count), self._last_block.ending():
            feed(self._model, batch, forward)
        for name, leader in self._leader.items():
            if name not in self._left_out and self._calls[name] != len(self._inputs[leader]):
                raise self._not_shared(leader, name)
        first = self._samples == 0
        self._samples += size
        self._is_checked = False
        self._alive.clear()
        if first:
            self._check_called()
            self._check_finite()

    def finish(self, weights: dict[str, str]) -> Statistics:
        """The statistics of all that was read, here and in the other processes."""
        self._check_finite()
        counted = of_all(self._counted(), weights, partial(device_of_layer, self._model))
        uncalled = [name for name in self._names if name not in counted.called and name not in counted.left_out]
        left_out = counted.left_out | dict.fromkeys(uncalled, "was never called, so it has no inputs to learn from")
        empty = [name for name in counted.called if self._leader[name] not in counted.layers]
        left_out |= dict.fromkeys(empty, "has no position that the mask counts")
        names = [name for name in self._names if name not in left_out]
        return Statistics(
            layers={name: counted.layers[self._leader[name]] for name in names},
            samples=counted.samples,
            weights=weights,
            classes=tuple(counted.labels),
            class_samples=tuple(counted.class_samples.values()),
            head=self._probe.head,
            shift_to={name: self._probe.shift_to[name] for name in names},
            left_out=left_out,
        )

    def _counted(self) -> Counted:
        """What this process has counted."""
        labels = sorted(self._codes)
        order = [self._codes[label] for label in labels]
        filled = {leader: accumulator for leader, accumulator in self._accumulators.items() if not accumulator.is_empty}
        self._accumulators = {}  # so that their sums can go when those of all processes are there

        def finished(accumulator: Accumulator) -> LayerStatistics:
            layer = _ascending(accumulator.finish(), order)
            return layer if processes() > 1 else layer.settle_()  # at once, before the next layer's is made

        return Counted(
            layers={leader: finished(accumulator) for leader, accumulator in filled.items()},
            drawn={leader: drawn for leader, part in filled.items() if (drawn := part.drawn) is not None},
            called=list(self._order),
            left_out=dict(self._left_out),
            class_samples={label: self._class_samples[label] for label in labels},
            samples=self._samples,
        )

    def _count(self, name: str, module: nn.Module, given: Tensor, output: Tensor, routed: Routed | None) -> None:
        if name in self._left_out or not given.numel():  # an expert may be called without a token
            return
        self._last_block.note_call()
        if name not in self._checked:
            self._checked.add(name)
            if self._refused(name, not proves_itself(module, given, output), _OWN_WAY):
                return
        assert self._facts is not None
        is_known = routed is None or routed.rows is not None
        if self._refused(name, not is_known and self._facts.tells_rows_apart, _LOST):
            return
        self._order[name] = None
        leader = self._leader[name]
        seen, key = self._inputs[leader], identity(given)
        call = self._calls[name]
        self._calls[name] += 1
        if call < len(seen):  # a layer with the same input was called before
            if seen[call] != key:
                raise self._not_shared(leader, name)
            return
        seen.append(key)
        if leader in self._leading:
            self._alive.append(given)
        facts = self._facts.to(given.device)
        self._accumulators[leader].add(given, facts.of(routed) if routed is not None and is_known else facts)

    def _not_shared(self, leader: str, name: str) -> LayerError:
        return LayerError(
            f"layers {leader!r} and {name!r} received the same input at first but not later, so their statistics "
            "cannot be shared. Collect them in two calls: layers=[...] with one of them each."
        )

    def _refused(self, name: str, refused: bool, why: str) -> bool:
        if not refused:
            return False
        reason = why.format(type(layer_of(self._model, name)).__name__)
        if self._named:
            raise LayerError(f"layer {name!r} {reason}. Leave it out of layers=...")
        self._left_out[name] = reason
        return True

    def _facts_of(self, size: int, labels: Tensor | None, mask: Tensor | None) -> BatchFacts:
        counting = None if mask is None else Counting.of(mask)
        if labels is None or not self._by_class:
            return BatchFacts(size, None, (), 0, counting)
        distinct, inverse, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
        present = tuple(self._codes.setdefault(label, len(self._codes)) for label in distinct.tolist())
        for label, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._class_samples[label] = self._class_samples.get(label, 0) + count
        codes = torch.tensor(present)[inverse].to(device_of(self._model), non_blocking=True)
        return BatchFacts(size, codes, present, len(self._codes), counting)

    def _check_called(self) -> None:
        experts = expert_modules(self._model)  # to which a batch may send no token
        missing = [name for name in self._names if name not in self._order and not is_routed(name, experts)]
        if self._named and missing:
            raise LayerError(
                f"layer {missing[0]!r} was never called on the first batch, so it has no inputs to learn from.\n"
                "Leave it out with layers=..., or pass data that reaches it."
            )

    def _check_finite(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        leaders = [name for name in self._order if name in self._accumulators]
        if not leaders:
            return
        found = [self._accumulators[name].witness() for name in leaders]
        finite = torch.stack([each.to(found[0].device) for each in found]).isfinite().cpu()  # one wait, not one a layer
        if not finite.all():
            name = leaders[int((~finite).nonzero()[0])]
            raise DataError(
                f"layer {name!r} received NaN or infinite inputs, or ones so large that the sums of their squares are "
                "infinite. Look at the data, or at the layer before."
            )


def _ascending(layer: LayerStatistics, order: list[int]) -> LayerStatistics:
    """Class tensors by ascending label instead of by first appearance."""
    if not len(layer.class_rows) or order == list(range(len(layer.class_rows))):
        return layer
    # A layer that was not called at the end has seen fewer classes.
    missing = len(order) - len(layer.class_rows)
    places_of = torch.tensor(order, device=layer.class_rows.device)
    rows, sums = (
        torch.cat([values, values.new_zeros(missing, *values.shape[1:])])[places_of]
        for values in (layer.class_rows, layer.class_sums)
    )
    places = {code: place for place, code in enumerate(order)}
    moments = {places[code]: value for code, value in layer.class_moments.items()}
    return LayerStatistics(layer.moments, rows, sums, dict(sorted(moments.items())), layer.sample)
