"""What a batch is: a tensor, a tuple (inputs, labels, ...) or a mapping of keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from unmerge.data.misfits import KINDS, is_misfit, misfit
from unmerge.distributed.processes import is_first
from unmerge.errors import DataError
from unmerge.placement.offloading import execution_device
from unmerge.tokens import answer, positions, question

Forward = Callable[[nn.Module, Any], Any]
Item = TypeVar("Item")
PROBE_SAMPLES = 2  # that a first look at a model takes

Mask = Callable[[Any], Tensor] | str | None

_NAMED: dict[str, Mask] = {"all": None, "answer": answer, "question": question}
DEALT = "group that unmerge dealt out"  # in place of a batch's own; no forward function sees it
BESIDE = ("labels", "group", "subject", DEALT)  # entries of a mapping that stand beside what the model is given


def inputs_of(batch: Any) -> Any:
    """What the model is given: the tensor, the first entry of a tuple, or the mapping without its labels and masks."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in BESIDE}
    if isinstance(batch, (tuple, list)) and batch:
        return batch[0]
    return batch


def first_tensor(batch: Any) -> Tensor:
    """The first tensor of the model's inputs, whose leading dimension counts the samples."""
    inputs = inputs_of(batch)
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return value
    raise DataError(
        f"a batch of type {type(batch).__name__} holds no input tensor. A batch is a tensor, a tuple "
        "(inputs, labels, ...) or a mapping of keyword arguments; pass forward= for anything else."
    )


def labels_of(batch: Any) -> Tensor | None:
    """Class labels: a 1-D integer tensor with one entry a sample; anything else (token labels) is none.

    A mapping may have them under "group" instead: all tokens of a sample get its group.
    """
    labels = None
    if isinstance(batch, Mapping):
        labels = batch.get(DEALT, batch.get("group", batch.get("labels")))
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        return None
    if labels.is_floating_point() or labels.dtype == torch.bool or len(labels) != len(first_tensor(batch)):
        return None
    return labels


def class_labels(classes: Any) -> list[int]:
    """The labels of `classes=` in ascending order, each once."""
    try:
        found: list[Any] = list(classes)
    except TypeError:  # a single label
        found = []
    if not found or not all(isinstance(label, Integral) and not isinstance(label, bool) for label in found):
        raise DataError(f"classes={classes!r} is not a list of labels, for example classes=[3, 5].")
    return sorted({int(label) for label in found})


def mask_of(batch: Any, mask: Mask) -> Tensor | None:
    """Which positions count: of a mapping's 2-D attention_mask, those of `mask(batch)` or the entry of that name."""
    attention = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    real = attention.bool() if isinstance(attention, Tensor) and attention.dim() == 2 else None
    if mask is None:
        return real
    if callable(mask):
        given = mask(batch)
    elif isinstance(batch, Mapping) and mask in batch:
        given = batch[mask]
    else:
        found = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(f"mask={mask!r} names an entry of the batch, which has {found}.")
    if not isinstance(given, Tensor) or given.dim() < 2:
        found = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"type {type(given).__name__}"
        raise DataError(f"the mask is of {found}; expected a tensor (samples, positions) that says which count.")
    chosen = given.bool()
    return chosen & real if real is not None and real.shape == chosen.shape else chosen


def counted_by(mask: Mask) -> str:
    """What a mask counts, in a word: "all", "answer", "question", the name of an entry, or "custom" for any other."""
    if isinstance(mask, str):
        return mask
    return next((name for name, known in _NAMED.items() if mask is known), "custom")


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed, its structure kept."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def first_samples(batch: Any, samples: int) -> Any:
    """The first samples of a batch."""
    size = len(first_tensor(batch))
    return map_tensors(batch, lambda tensor: tensor[:samples] if tensor.dim() and len(tensor) == size else tensor)


def select_samples(batch: Any, places: Tensor) -> Any:
    """The samples of a batch at some places."""
    size = len(first_tensor(batch))
    return map_tensors(
        batch, lambda tensor: tensor[places.to(tensor.device)] if tensor.dim() and len(tensor) == size else tensor
    )


def feed(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """The model's output for a batch; one that it cannot take is described, but by a `forward` of the user's own."""
    if forward is not None:
        if isinstance(batch, Mapping) and DEALT in batch:
            batch = {name: value for name, value in batch.items() if name != DEALT}
        return forward(model, batch)
    inputs = inputs_of(batch)
    try:
        return model(**_with_positions(model, inputs)) if isinstance(inputs, Mapping) else model(inputs)
    except KINDS as error:
        if not is_misfit(error):
            raise
        raise misfit(error, inputs) from error


def _with_positions(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs of a language model with the positions that left padding would shift."""
    mask = inputs.get("attention_mask")
    if "position_ids" in inputs or not isinstance(mask, Tensor) or mask.dim() != 2:
        return inputs
    if not mask.is_cuda and mask[:, 0].all():  # nothing is shifted; on a GPU to ask would be to wait
        return inputs
    takes_positions = "position_ids" in signature(model.forward).parameters
    return {**inputs, "position_ids": positions(mask)} if takes_positions else inputs


def logits_of(output: Any) -> Tensor | None:
    """The logits of a model's output, where it has any."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def classifier_logits(output: Any, otherwise: str = "") -> Tensor:
    """The logits (samples, classes) of a classifier's output; `otherwise` is what else can be typed without them."""
    logits = logits_of(output)
    if logits is None or logits.dim() != 2:
        found = type(output).__name__ if logits is None else f"a tensor of shape {tuple(logits.shape)}"
        raise DataError(
            f"the model returned {found}; expected logits (samples, classes), alone or as .logits. Pass forward=, "
            f"which returns them{otherwise}."
        )
    return logits


def device_of(model: nn.Module) -> torch.device:
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return device if device.type != "meta" else execution_device(model) or device


def on_device(model: nn.Module, batch: Any) -> Any:
    device = device_of(model)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def batches(data: Iterable[Any], what: str) -> Iterator[Any]:
    """The batches of `data`, with a progress bar on a terminal; at least one."""
    check_iterable(data, what)
    count = 0
    for batch in progress(data, what, length_of(data)):
        yield batch
        count += 1
    if count == 0:
        raise no_batch(what)


def length_of(data: Any) -> int | None:
    """How many batches there are, where the data says so; a loader of a stream does not."""
    try:
        return len(data)
    except TypeError:
        return None


def progress(data: Iterable[Item], what: str, total: int | None, unit: str = "batch") -> Iterable[Item]:
    """`data` with a progress bar on a terminal; of several processes the first shows it."""
    hidden = None if is_first() else True  # None: only where there is a terminal
    return tqdm(data, desc=what, total=total, unit=unit, disable=hidden, leave=False)


def first_batch(data: Iterable[Any], what: str) -> Any:
    for batch in data:
        return batch
    raise no_batch(what)


def no_batch(what: str) -> DataError:
    return DataError(f"{what}: the data gave no batch. Expected at least one; an iterator read before is empty.")


def check_iterable(data: Any, what: str) -> None:
    one_batch = isinstance(data, (tuple, list)) and len(data) > 1 and labels_of(data) is not None
    if one_batch or isinstance(data, (Tensor, Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise DataError(
            f"{what}: expected an iterable of batches (a DataLoader, a list) but got {type(data).__name__}. "
            "Wrap a Dataset in a DataLoader; for a single batch pass [batch]."
        )


def check_rereadable(data: Any, what: str, why: str) -> None:
    """Refuse a generator where the data is read a second time."""
    check_iterable(data, what)
    if isinstance(data, Iterator):
        raise DataError(
            f"{what} is a one-shot iterator ({type(data).__name__}), but {why} reads it a second time. "
            "Pass a DataLoader or a list."
        )
