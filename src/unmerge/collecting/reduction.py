"""What a pass has counted in one process, and the sum of what it has counted in all: once a layer, at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unmerge.collecting.accumulation import LayerStatistics, of_classes
from unmerge.distributed.processes import add_up_, exchange, gathered, rank, size
from unmerge.errors import RankError
from unmerge.storage.fingerprint import differences
from unmerge.sums.moments import Moments
from unmerge.sums.sampling import Drawn
from unmerge.sums.sketching import moments_of

Slot = int | None  # the label whose moments these are, or None for those of all rows


@dataclass
class Counted:
    """What a pass has counted of each layer, or set of layers with the same input, and what it met on the way."""

    layers: dict[str, LayerStatistics]  # class tensors by ascending label; a layer without rows is not there
    drawn: dict[str, Drawn]  # how the rows of a layer's sample were drawn
    called: list[str]
    left_out: dict[str, str]
    class_samples: dict[int, int] = field(default_factory=dict)  # by ascending label
    samples: int = 0

    @property
    def labels(self) -> list[int]:
        return list(self.class_samples)


def of_all(own: Counted, weights: dict[str, str], device_of: Callable[[str], torch.device]) -> Counted:
    """What all processes have counted together; device_of: where a layer is that this process has not called."""
    if size() == 1:
        return own
    told = exchange(_told(own, weights))
    _check_weights([entry["weights"] for entry in told])
    class_samples: dict[int, int] = {}
    for label, count in sorted(pair for entry in told for pair in entry["class_samples"]):
        class_samples[label] = class_samples.get(label, 0) + count
    result = Counted(
        layers={},
        drawn={},
        called=_union(entry["called"] for entry in told),
        left_out={name: reason for entry in reversed(told) for name, reason in entry["left_out"].items()},
        class_samples=class_samples,
        samples=sum(entry["samples"] for entry in told),
    )
    draws = gathered(own.drawn) if any(entry["sampled"] for entry in told) else []
    for name in _union(entry["layers"] for entry in told):
        shapes = [entry["layers"].get(name) for entry in told]
        layer = own.layers.pop(name, None)  # whose sums end in those of all
        device = device_of(name) if layer is None else layer.device
        result.layers[name] = _layer(layer, own.labels, result.labels, shapes, device)
        if draws:
            drawn = [draw.get(name, Drawn.nothing()) for draw in draws]
            shape = next(entry["sampled"][name] for entry in told if name in entry["sampled"])
            rows = None if layer is None else layer.sample
            result.layers[name].sample, result.drawn[name] = _sample(rows, drawn, shape, device)
    return result


def _told(own: Counted, weights: dict[str, str]) -> dict[str, Any]:
    """What the other processes need to know before tensors are added up."""
    return {
        "samples": own.samples,
        "class_samples": list(own.class_samples.items()),
        "called": own.called,
        "left_out": own.left_out,
        "weights": weights,
        "layers": {name: _shape(layer, own.labels) for name, layer in own.layers.items()},
        "sampled": {
            name: [list(layer.sample.shape), _name(layer.sample.dtype), own.drawn[name].size]
            for name, layer in own.layers.items()
            if layer.sample is not None
        },
    }


def _shape(layer: LayerStatistics, labels: list[int]) -> dict[str, Any]:
    slots = _slots(layer, labels)
    return {
        "features": list(layer.moments.mean.shape),
        "sums": {name: [list(part.shape), _name(part.dtype)] for name, part in layer.moments.open_sums.items()},
        "kept": _name(layer.moments.kept),
        "rows": [[label, moments.n] for label, moments in slots.items()],
        "by_class": len(layer.class_sums) > 0,
    }


def _slots(layer: LayerStatistics | None, labels: list[int]) -> dict[Slot, Moments]:
    """The moments that are added up: those of each class, or else of all rows."""
    if layer is None:
        return {}
    if not layer.class_moments:
        return {None: layer.moments}
    return {labels[place]: moments for place, moments in layer.class_moments.items()}


def _layer(
    own: LayerStatistics | None,
    own_labels: list[int],
    labels: list[int],
    shapes: list[dict[str, Any] | None],
    device: torch.device,
) -> LayerStatistics:
    known = next(shape for shape in shapes if shape is not None)
    features, sums = known["features"], known["sums"]
    # Of each slot the rows of every process; the first that has some gives the pivot about which all are summed.
    rows = [dict(map(tuple, shape["rows"])) if shape is not None else {} for shape in shapes]
    slots: list[Slot] = sorted({label for counts in rows for label in counts}, key=lambda label: label or 0)
    mine = _slots(own, own_labels)
    pivots = torch.zeros(len(slots), *features, dtype=torch.float64, device=device)
    for place, slot in enumerate(slots):
        if rank() == next(process for process, counts in enumerate(rows) if slot in counts):
            pivots[place] = mine[slot].pivot
    add_up_(pivots)
    totals = torch.zeros_like(pivots)
    for place, slot in enumerate(slots):
        if slot in mine:
            mine[slot].move_pivot_(pivots[place])
            totals[place] = mine[slot].total
    by_class = known["by_class"] and None in slots  # full moments of each class have its sum
    class_rows = totals.new_zeros(len(labels) if by_class else 0)
    class_sums = totals.new_zeros(len(class_rows), *features)
    if own is not None and by_class:
        places = torch.tensor([labels.index(label) for label in own_labels], dtype=torch.int64, device=device)
        class_rows[places], class_sums[places] = own.class_rows, own.class_sums
    add_up_(totals, class_rows, class_sums)
    found = {}
    for place, slot in enumerate(slots):
        zeros = {
            name: torch.zeros(shape, dtype=getattr(torch, kind), device=device)
            for name, (shape, kind) in sums.items()
            if slot not in mine
        }
        added = {name: add_up_((zeros or mine[slot].open_sums)[name]) for name in sums}
        count = sum(counts.get(slot, 0) for counts in rows)
        found[slot] = moments_of(count, pivots[place], totals[place], added, getattr(torch, known["kept"]))
    if None not in found:
        by_place = {labels.index(slot): moments for slot, moments in found.items() if slot is not None}
        return of_classes(by_place, len(labels)).settle_()
    result = LayerStatistics(found[None], class_rows, class_sums) if by_class else LayerStatistics(found[None])
    return result.settle_()


def _sample(own: Tensor | None, draws: list[Drawn], shape: list[Any], device: torch.device) -> tuple[Tensor, Drawn]:
    """The rows with the smallest keys of all, in the order of the data."""
    (*groups, _, features), kind, wanted = shape[0], getattr(torch, shape[1]), shape[2]
    keys, places = (torch.cat([getattr(draw, part) for draw in draws]) for part in ("keys", "places"))
    kept = keys.argsort(stable=True)[:wanted]
    kept = kept[places[kept].argsort(stable=True)]
    first = sum(len(draw.keys) for draw in draws[: rank()])
    here = ((kept >= first) & (kept < first + len(draws[rank()].keys))).nonzero()[:, 0]
    rows = torch.zeros(*groups, len(kept), features, dtype=torch.promote_types(kind, torch.float32), device=device)
    if own is not None:
        rows[..., here.to(device), :] = own[..., (kept[here] - first).to(device), :].to(rows.dtype)
    return add_up_(rows).to(kind), Drawn(keys[kept], places[kept], wanted)


def _check_weights(weights: list[dict[str, str]]) -> None:
    for process, other in enumerate(weights):
        changed = differences(other, weights[0])
        if changed:
            raise RankError(
                f"the processes have different weights: {changed[0]!r} of process {process} is not that of process 0. "
                "Load the same checkpoint in every process."
            )


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
