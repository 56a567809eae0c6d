"""One forward pass per model and split, from which every figure follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.collecting.probe import output_layer
from unmerge.data.batches import Forward, feed, first_tensor, labels_of, logits_of, on_device
from unmerge.data.reading import Reading
from unmerge.distributed.processes import gathered, size
from unmerge.errors import DataError, LayerError, suggest
from unmerge.evaluation.predictions import Outputs, SplitOutputs, check
from unmerge.evaluation.samples import draw_order, row_keys
from unmerge.model.evaluating import evaluating
from unmerge.model.layers import is_transposed

KEEP_FEATURES = 5000
_NAMING = "Name it: features='avgpool' takes what that layer returns, features='fc:input' what it receives."


def outputs(
    model: nn.Module,
    splits: Mapping[str, Iterable[Any]],
    *,
    features: str | None = None,
    keep_features: int = KEEP_FEATURES,
    forward: Forward | None = None,
    seed: int = 0,
    name: str = "model",
) -> Outputs:
    """Logits, labels and penultimate features of a model on every split; the model is left as it was.

    features: the layer, such as "avgpool" (its output) or "fc:input"; by default what the classifier receives, which is
        the linear layer whose output the model returns, also behind a logit mask, or else the last one.
    keep_features: how many samples a split keep their features, drawn by content and seed; 0 for none.
    """
    layer = feature_layer(model, features) if keep_features and features is not None else None
    found = {}
    for split, data in splits.items():
        with evaluating(model):
            reading = Reading(model, data, split, forward)
            if keep_features and layer is None:
                few = on_device(model, reading.few)
                classifier = output_layer(model, few, forward, masked=True)
                layer = feature_layer(model) if classifier is None else f"{classifier}:input"
            with _watched(model, layer) as seen:
                found[split] = _pass(model, reading, split, layer, seen, keep_features, forward, seed)
    result = Outputs(found, layer)
    check(result, name)
    return result


def feature_layer(model: nn.Module, features: str | None = None) -> str:
    """The layer that gives the features: the named one, or "<last linear layer>:input"."""
    modules = {name: module for name, module in model.named_modules() if name}
    if features is not None:
        layer = features.removesuffix(":input")
        if layer not in modules:
            raise LayerError(f"features={features!r}: there is no layer {layer!r}. {suggest(layer, modules)} {_NAMING}")
        return features
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) or is_transposed(module)]
    if not linear:
        raise LayerError(
            f"{type(model).__name__} has no nn.Linear, so its penultimate layer cannot be found. {_NAMING}"
        )
    return f"{linear[-1]}:input"


def _pass(
    model: nn.Module,
    reading: Reading,
    split: str,
    layer: str | None,
    seen: list[Tensor],
    keep: int,
    forward: Forward | None,
    seed: int,
) -> SplitOutputs:
    logits, labels, keys, places = [], [], [], []
    features, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    count = 0
    for piece in reading:
        batch = piece.batch
        seen.clear()
        target = labels_of(batch)
        if target is None:
            raise DataError(
                f"split {split!r} has no class labels. Expected batches (inputs, labels) or mappings with "
                "'labels', one integer a sample."
            )
        answer = _logits(feed(model, on_device(model, batch), forward), len(target), split)
        logits.append(answer.float().cpu())
        labels.append(target.long().cpu())
        keys.append(row_keys(first_tensor(batch)).cpu())
        places.append((piece.number << 32) + torch.arange(len(target)))
        if layer is not None:
            new = _features(seen, layer, len(target))
            features = torch.cat([features, new]) if len(features) else new
            rows = torch.cat([rows, torch.arange(count, count + len(target))])
            # The draw is by content, so that what falls out early would have fallen out late.
            if len(rows) > 2 * keep:
                features, rows = _drawn(features, rows, torch.cat(keys), keep, seed)
        count += len(target)
    own = [torch.cat(parts) for parts in (logits, labels, keys, places)] if logits else None
    (all_logits, all_labels, all_keys), features, rows = _of_all(own, features, rows)
    if layer is None:
        return SplitOutputs(all_logits, all_labels, all_keys)
    features, rows = _drawn(features, rows, all_keys, keep, seed)
    return SplitOutputs(all_logits, all_labels, all_keys, features, rows)


def _of_all(own: list[Tensor] | None, features: Tensor, rows: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Logits, labels and keys of all processes in the order of the data, and the features with their rows in them."""
    if size() == 1:
        assert own is not None
        return own[:-1], features, rows
    found = [(part, kept, chosen) for part, kept, chosen in gathered((own, features, rows)) if part is not None]
    starts = [0]
    for part, _, _ in found:
        starts.append(starts[-1] + len(part[0]))
    *whole, places = (torch.cat(columns) for columns in zip(*(part for part, _, _ in found), strict=True))
    order = places.argsort(stable=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    rows = torch.cat([position[start + chosen] for start, (_, _, chosen) in zip(starts, found, strict=False)])
    return [column[order] for column in whole], torch.cat([kept for _, kept, _ in found]), rows


def _drawn(features: Tensor, rows: Tensor, keys: Tensor, keep: int, seed: int) -> tuple[Tensor, Tensor]:
    chosen = draw_order(keys[rows], seed)[:keep]
    return features[chosen], rows[chosen]


def _logits(output: Any, size: int, split: str) -> Tensor:
    logits = logits_of(output)
    if logits is None:
        kind = type(output).__name__
        fields = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise DataError(
            f"split {split!r}: the model returned no logits but a {kind}{fields}. Expected a tensor (samples, classes) "
            "or an output with .logits; pass forward=lambda model, batch: ... that returns them."
        )
    if logits.dim() != 2 or len(logits) != size or not logits.is_floating_point():
        raise DataError(
            f"split {split!r}: the model returned {logits.dtype} of shape {tuple(logits.shape)} for {size} samples. "
            "Expected floating-point logits (samples, classes); pass forward= that returns them."
        )
    return logits


def _features(seen: list[Tensor], layer: str, size: int) -> Tensor:
    """One row a sample: positions and tokens are averaged."""
    if not seen:
        raise LayerError(f"layer {layer.removesuffix(':input')!r} was not called, so it gives no features. {_NAMING}")
    values = seen[-1]
    if values.dim() < 2 or len(values) != size:
        raise LayerError(
            f"layer {layer!r} gives {tuple(values.shape)} for {size} samples; expected a row a sample. {_NAMING}"
        )
    if values.dim() == 3:
        values = values.mean(1)
    elif values.dim() > 3:
        values = values.flatten(2).mean(2)
    return values.float().cpu()


@contextmanager
def _watched(model: nn.Module, layer: str | None) -> Iterator[list[Tensor]]:
    """A list that gets the layer's input or output at every call."""
    seen: list[Tensor] = []
    if layer is None:
        yield seen
        return

    def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = next(iter([*args, *kwargs.values()])) if layer.endswith(":input") else logits_of(output)
        if isinstance(value, Tensor):
            seen.append(value.detach())

    handle = model.get_submodule(layer.removesuffix(":input")).register_forward_hook(watch, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
