"""collect(): a forward pass over data, in which hooks turn each layer's inputs into moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from unmerge.collecting.accumulation import Keep
from unmerge.collecting.probe import Probe, output_layer, probe
from unmerge.collecting.recorder import Recorder
from unmerge.collecting.statistics import Statistics, joined
from unmerge.data.batches import (
    DEALT,
    PROBE_SAMPLES,
    Forward,
    Mask,
    check_rereadable,
    counted_by,
    device_of,
    first_samples,
    labels_of,
    on_device,
)
from unmerge.data.reading import Reading
from unmerge.data.unread import unread_labels
from unmerge.distributed.processes import alone, exchange, together
from unmerge.distributed.warning import warn
from unmerge.errors import DataError, LayerError, reasons
from unmerge.model.evaluating import evaluating
from unmerge.model.ledger import as_collected
from unmerge.model.selection import Selection, select
from unmerge.placement.state import state_of
from unmerge.planning.costs import Grams, costs_of
from unmerge.planning.plans import bytes_of, plan_within
from unmerge.recipe import LayerChoice
from unmerge.storage.fingerprint import fingerprint


@dataclass(frozen=True)
class View:
    """What is known of a model before a pass: checksums, the layers to read and what a few samples showed of them."""

    weights: dict[str, str]
    selection: Selection
    probe: Probe | None = None  # None: the pass looks for itself
    has_labels: bool = False  # whether those samples had labels
    tells: bool = True  # whether to warn of layers that are left out
    sketches: Mapping[str, int] = field(default_factory=dict)  # layers whose Gram is too large, with a size for each

    def only(self, names: Sequence[str], with_left_out: bool) -> View:
        """The view of some layers; what was left out is told with one part alone."""
        left_out = self.selection.left_out if with_left_out else {}
        return replace(self, selection=replace(self.selection, names=list(names), left_out=left_out))


def view_of(model: nn.Module, layers: LayerChoice | Statistics, skip_layers: int | str = 0) -> View:
    """What is known without data: of earlier statistics' layers what these have seen."""
    weights = fingerprint(state_of(model))
    if not isinstance(layers, Statistics):
        return View(weights, select(model, layers, skip_layers))
    layers.check_weights(weights)
    selection = Selection(list(layers.layers), named=True)
    return View(weights, selection, layers.probe, bool(layers.classes), sketches=layers.sketches)


def same_layers(found: Statistics, view: View | None) -> Statistics | View:
    """What a second pass reads: the layers that a first one found; with a view the weights need no second check."""
    return found if view is None else view.only(list(found.layers), with_left_out=False)


def looked(model: nn.Module, view: View, batch: Any, forward: Forward | None, mask: Mask = None) -> View:
    """The view with what the first samples of a batch show, unless that is known."""
    has_labels = labels_of(batch) is not None
    if view.probe is not None and (view.has_labels or not has_labels):
        return view
    few = on_device(model, first_samples(batch, PROBE_SAMPLES))
    seen = probe(model, view.selection.names, few, forward, mask)
    head, skipped = seen.head, view.selection.skipped
    if view.probe is not None:  # a second look, which may be at some of the layers
        head = head or view.probe.head
    elif seen.returns_rows and head is None:
        head = output_layer(model, few, forward)
        if head is not None and skipped is not None:
            # Another layer, which stands last in the model, was taken for the classifier.
            view = replace(view, selection=select(model, None, skipped, head))
            seen = probe(model, view.selection.names, few, forward, mask)
    return replace(view, probe=replace(seen, head=head), has_labels=has_labels)


@together
def collect(
    model: nn.Module,
    data: Iterable[Any],
    layers: LayerChoice | Statistics | View = None,
    *,
    skip_layers: int | str = 0,
    per_class: str = "means",
    sample: int = 0,
    max_points: int | None = None,
    mask: Mask = None,
    forward: Forward | None = None,
    seed: int = 0,
    memory: int | str | None = None,
    what: str = "collect",
) -> Statistics:
    """The statistics of the layers' inputs over one pass of `data`; the model is left as it was.

    layers: names, shorthands ("mlp:last4"), 're:' patterns or a predicate; None takes every editable layer after the
        first `skip_layers`.
        Earlier `Statistics` of the same weights take theirs, and what their first samples showed of them; edits that
        were applied since are set aside meanwhile.
    per_class: with labels, keep the "means" of every class, or the "full" moments of each (cav-class).
    sample: this many rows a layer are kept, drawn at random (cav-kmeans).
    max_points: count only the first rows of each layer, and stop reading when all have theirs.
    mask: `mask(batch)` or the name of an entry: which positions count. A 2-D attention_mask is used by itself.
    forward: `forward(model, batch)` in place of `model(inputs)` or `model(**batch)`; the pass may end inside it as soon
        as the last of the layers was called.
    memory: bytes, or text such as "8GB", that statistics may take on the model's device: more passes read fewer layers
        each, and what they leave is kept on the CPU. A layer whose Gram alone takes more is sketched.
    """
    if per_class not in ("means", "full"):
        raise DataError(f"per_class={per_class!r} is not 'means' or 'full'.")
    if sample < 0 or (max_points is not None and max_points < 1):
        raise DataError(f"sample={sample} and max_points={max_points} count rows: expected 0 or more, and 1 or more.")
    keep = Keep(per_class == "full", sample, max_points, seed)
    known = layers if isinstance(layers, Statistics) else None
    with as_collected(model, None if known is None else known.weights), evaluating(model):
        view = layers if isinstance(layers, View) else view_of(model, layers, skip_layers)
        if memory is None:
            found = _read(model, data, view, keep, mask, forward, what)
        else:
            found = _read_in_parts(model, data, view, keep, mask, forward, what, bytes_of(memory))
    found.counted = counted_by(mask)
    if found.left_out and view.tells:
        warn(f"left out: {reasons(found.left_out)}.")
    if not found.layers and not isinstance(layers, View):  # a view may be a part of what is collected
        raise LayerError(f"no selected layer is left to collect: {reasons(found.left_out)}.")
    if known is not None:
        found.left_out = {**known.left_out, **found.left_out}
    return found


def _read(
    model: nn.Module, data: Iterable[Any], view: View, keep: Keep, mask: Mask, forward: Forward | None, what: str
) -> Statistics:
    if not view.selection.names:
        return Statistics({}, 0, view.weights)
    bounded = keep.max_points is not None  # the first rows are the same for all, and few
    reading = Reading(model, data, what, forward, whole=bounded)
    view = looked(model, view, reading.few, forward, mask)
    assert view.probe is not None
    labelled, dealt = labels_of(reading.few) is not None, isinstance(reading.few, Mapping) and DEALT in reading.few
    recorder = Recorder(model, view.selection, view.probe, labelled, keep, view.sketches, dealt)
    for place, piece in enumerate(reading):
        unread = unread_labels(piece.batch) if place == 0 else None
        if unread is not None:
            warn(f"{what}: the labels of the batches are not read, since {unread}. Without them no class is known.")
        recorder.read(piece.batch, mask, forward, piece.number)
        if recorder.is_full:
            break
    with alone() if bounded else nullcontext():
        return recorder.finish(view.weights)


def _read_in_parts(
    model: nn.Module,
    data: Iterable[Any],
    view: View,
    keep: Keep,
    mask: Mask,
    forward: Forward | None,
    what: str,
    memory: int,
) -> Statistics:
    """Statistics from as many passes as the memory asks for, each part moved to the CPU before the next is read."""
    check_rereadable(data, what, "memory=")
    view = looked(model, view, Reading(model, data, what).few, forward, mask)
    assert view.probe is not None
    classes = len(distinct_labels(data)) if view.has_labels else 0
    full = classes + 1 if keep.full else 1
    grams = Grams(full, counting=full, rows=keep.sample, sums_reading=classes, sums_solving=classes)
    costs = costs_of(model, view.selection.names, view.probe.leader, grams, memory=memory, sketched=view.sketches)
    plan = plan_within(costs, memory)
    groups, view = plan.groups, replace(view, sketches=plan.sketches)
    if device_of(model).type == "cpu" and len(groups) > 1:
        raise DataError(
            f"the statistics do not fit memory={memory} bytes, and on the CPU there is nowhere else to keep them. Name "
            "fewer layers, or call fit(..., memory=...), which keeps no statistics."
        )
    parts = []
    for place, group in enumerate(groups):
        part = view.only(group.layers, with_left_out=place == 0)
        parts.append(_read(model, data, part, keep, mask, forward, f"{what} {place + 1}/{len(groups)}").to("cpu"))
    return joined(parts)


def distinct_labels(data: Iterable[Any]) -> set[int]:
    """The class labels of some batches, read without a forward pass; all batches have them, or none has."""
    found: set[int] = set()
    for batch in data:
        labels = labels_of(batch)
        if labels is None:
            break
        found |= set(torch.unique(labels).tolist())
    return set().union(*exchange(sorted(found)))
