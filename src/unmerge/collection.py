"""collect(): a forward pass over data, in which hooks turn each layer's inputs into moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from unmerge.accumulation import Keep
from unmerge.batches import PROBE_SAMPLES, Forward, Mask, batches, first_samples, labels_of, on_device
from unmerge.errors import DataError
from unmerge.fingerprint import fingerprint, state_of
from unmerge.layers import select
from unmerge.ledger import as_collected
from unmerge.normalization import evaluating
from unmerge.probe import probe
from unmerge.recipe import LayerChoice
from unmerge.recorder import Recorder
from unmerge.statistics import Statistics


def collect(
    model: nn.Module,
    data: Iterable[Any],
    layers: LayerChoice | Statistics = None,
    *,
    skip_layers: int | str = 0,
    per_class: str = "means",
    sample: int = 0,
    max_points: int | None = None,
    mask: Mask = None,
    forward: Forward | None = None,
    seed: int = 0,
    what: str = "collect",
) -> Statistics:
    """The statistics of the layers' inputs over one pass of `data`; the model is left as it was.

    layers: names, 're:' patterns or a predicate; None takes every editable layer after the first `skip_layers`.
        Earlier `Statistics` of the same weights take theirs, and what their first samples showed of them; edits that
        were applied since are set aside meanwhile.
    per_class: with labels, keep the "means" of every class, or the "full" moments of each (cav-class).
    sample: this many rows a layer are kept, drawn at random (cav-kmeans).
    max_points: count only the first rows of each layer, and stop reading when all have theirs.
    mask: `mask(batch)` or the name of an entry: which positions count. A 2-D attention_mask is used by itself.
    forward: `forward(model, batch)` in place of `model(inputs)` or `model(**batch)`.
    """
    if per_class not in ("means", "full"):
        raise DataError(f"per_class={per_class!r} is not 'means' or 'full'.")
    if sample < 0 or (max_points is not None and max_points < 1):
        raise DataError(f"sample={sample} and max_points={max_points} count rows: expected 0 or more, and 1 or more.")
    keep = Keep(per_class == "full", sample, max_points, seed)
    known = layers if isinstance(layers, Statistics) else None
    with as_collected(model, None if known is None else known.weights):
        return _collect(model, data, layers, skip_layers, keep, mask, forward, what)


def _collect(
    model: nn.Module,
    data: Iterable[Any],
    layers: LayerChoice | Statistics,
    skip_layers: int | str,
    keep: Keep,
    mask: Mask,
    forward: Forward | None,
    what: str,
) -> Statistics:
    weights = fingerprint(state_of(model))
    known: Statistics | None = None
    if isinstance(layers, Statistics):
        known, layers = layers, layers.layers
        known.check_weights(weights)
    selection = select(model, layers, skip_layers)
    with evaluating(model):
        recorder: Recorder | None = None
        for batch in batches(data, what):
            if recorder is None:
                labelled = labels_of(batch) is not None
                if known is not None and (known.classes or not labelled):
                    seen = known.probe
                else:
                    few = on_device(model, first_samples(batch, PROBE_SAMPLES))
                    seen = probe(model, selection.names, few, forward)
                recorder = Recorder(model, selection, seen, labelled, keep)
            recorder.read(batch, mask, forward)
            if recorder.is_full:
                break
        assert recorder is not None
        statistics = recorder.finish(weights)
        if known is not None:
            statistics.left_out = {**known.left_out, **statistics.left_out}
        return statistics
