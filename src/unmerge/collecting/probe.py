"""A first look at the network: one small forward pass in which every layer proves what it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from unmerge.collecting.batch_facts import BatchFacts, Counting
from unmerge.collecting.consumers import Consumers
from unmerge.collecting.hooks import checked_experts, hooked
from unmerge.collecting.unfolding import agrees, chunks, geometry
from unmerge.data.batches import Forward, Mask, counted_by, feed, first_samples, first_tensor, logits_of, mask_of
from unmerge.errors import DataError
from unmerge.model.experts import Routed, Slice
from unmerge.model.layers import candidates, layer_of, tensor_name, weight_matrix
from unmerge.sums import shifts
from unmerge.sums.pivots import pivot_of

_ENOUGH = 32  # rows that tell whether their mean dominates, which half precision has to know


@dataclass
class Probe:
    """What the first samples show of each layer."""

    called: set[str] = field(default_factory=set)
    disagrees: set[str] = field(default_factory=set)  # does not return rows · weight + bias
    mixed: set[str] = field(default_factory=set)  # its input does not have the samples first
    leader: dict[str, str] = field(default_factory=dict)  # an earlier layer with the same rows
    shift_to: dict[str, str | None] = field(default_factory=dict)  # the tensor that takes a constant, if any
    head: str | None = None  # the layer whose output is the model's
    returns_rows: bool = False  # whether the model returns one row of logits a sample
    pivots: dict[str, Tensor] = field(default_factory=dict)  # near the mean of a layer's rows


def probe(model: nn.Module, names: Sequence[str], batch: Any, forward: Forward | None, mask: Mask = None) -> Probe:
    """Feed a batch of a few samples and watch the layers."""
    found = Probe()
    # A function of the user's own is not asked of samples that are no batch: what counts is near enough to all.
    counted = mask_of(batch, None if counted_by(mask) == "custom" else mask)
    facts = BatchFacts(len(first_tensor(batch)), None, (), 0, None if counted is None else Counting.of(counted))
    consumers = Consumers(model)
    inputs: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    outputs: dict[str, Tensor] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def look(name: str, module: nn.Module, given: Tensor, output: Tensor, routed: Routed | None) -> None:
        if not given.numel():  # an expert without a token: empty tensors would look like one input
            return
        with consumers.paused():
            found.called.add(name)
            if not proves_itself(module, given, output):
                found.disagrees.add(name)
                return
            inputs[name].append((*identity(given), geometry(module)))
            if routed is None:  # routing says which samples the rows are of
                shapes[name].append(tuple(given.shape))
            outputs[name] = output
            alive.extend((given, output))
            if name not in found.pivots and (pivot := _pivot(module, given, facts, routed)) is not None:
                found.pivots[name] = pivot
        consumers.watch(name, output)

    with checked_experts(model, names, found.disagrees), hooked(model, names, look), consumers:
        result = logits_of(feed(model, batch, forward))

    found.mixed = _mixed(model, names, batch, forward, shapes)
    first_with: dict[tuple[tuple[object, ...], ...], str] = {}
    for name, calls in inputs.items():
        leader = first_with.setdefault(tuple(calls), name)
        if leader != name:
            found.leader[name] = leader
    for name in names:
        module = layer_of(model, name)
        norm = consumers.sole_norm(name) if len(inputs[name]) == 1 else None
        if getattr(module, "bias", None) is not None:
            found.shift_to[name] = tensor_name(name, "bias")
        else:
            found.shift_to[name] = None if norm is None else f"{norm}.running_mean"
    # Logits of every token are no classifier's: their columns are words.
    found.returns_rows = result is not None and result.dim() == 2
    found.head = _returned(outputs, result) if found.returns_rows else None
    return found


def output_layer(model: nn.Module, batch: Any, forward: Forward | None, masked: bool = False) -> str | None:
    """The linear layer whose output the model returns, wherever it stands among the others; None if there is none.

    masked: also one of which some outputs are returned as they are and others replaced.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def call(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() == 2:
                outputs[name] = output

        return call

    with ExitStack() as stack:
        for name, module in candidates(model).items():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_hook(keep(name)).remove)
        result = logits_of(feed(model, batch, forward))
    found = _returned(outputs, result)
    if found is None and masked and result is not None:
        for name, output in outputs.items():
            if output.shape == result.shape and (output.to(result.device) == result).all(0).any():
                found = name
    return found


def _returned(outputs: Mapping[str, Tensor], result: Tensor | None) -> str | None:
    """The last layer whose output is what the model returned."""
    found = None
    for name, output in outputs.items():
        if result is not None and output.data_ptr() == result.data_ptr() and output.shape == result.shape:
            found = name
    return found


def proves_itself(module: nn.Module, given: Tensor, output: Any) -> bool:
    """Whether a layer returned input · weight + bias; a slice is checked with the module that holds it."""
    if isinstance(module, Slice):
        return True
    return isinstance(output, Tensor) and agrees(module, given, output, weight_matrix(module))


def _pivot(module: nn.Module, inputs: Tensor, facts: BatchFacts, routed: Routed | None) -> Tensor | None:
    """Zero where the sums are taken by shift, else near the mean of the rows that count.

    None where none counts or too few do.
    """
    try:
        facts = facts.to(inputs.device)
        facts = facts if routed is None or routed.rows is None else facts.of(routed)
        part, rows = next(chunks(module, inputs))
        _, kept = facts.kept(part, len(inputs), rows.shape[-2])
    except DataError:  # a mask that does not fit: the pass says so where it reads the layer
        return None
    flat = rows.flatten(-3, -2)
    flat = flat if kept is None else flat[..., kept, :]
    if flat.shape[-2] < (1 if flat.dtype.itemsize > 2 else _ENOUGH):
        return None
    pivot = pivot_of(flat)
    return pivot.new_zeros(pivot.shape) if shifts.applies(module, inputs) else pivot


def _mixed(
    model: nn.Module,
    names: Sequence[str],
    batch: Any,
    forward: Forward | None,
    shapes: dict[str, list[tuple[int, ...]]],
) -> set[str]:
    """The layers whose input does not grow in its first dimension with the number of samples."""
    size = len(first_tensor(batch))
    # A convolution, and a plain (samples, features) input, has them first.
    unsure = [
        name
        for name in names
        if not isinstance(layer_of(model, name), nn.Conv2d)
        and any(len(shape) > 2 or shape[0] != size for shape in shapes[name])
    ]
    if size == 1 or not unsure:
        return set()
    of_one: dict[str, list[int]] = defaultdict(list)
    with hooked(model, unsure, lambda name, _, given, *__: of_one[name].append(given.shape[0])):
        feed(model, first_samples(batch, 1), forward)
    return {name for name in unsure if [size * first for first in of_one[name]] != [shape[0] for shape in shapes[name]]}


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two uses of one tensor while it is alive and unchanged."""
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version)
