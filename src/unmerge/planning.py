"""How much memory a request takes, and in how many passes over the data it fits into less."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

from unmerge.errors import DataError, listing
from unmerge.layers import layer_of, weight_matrix
from unmerge.recipe import Recipe
from unmerge.tables import text_table

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

# Bytes a square of the input's width that the linear algebra of a layer holds beside its statistics, measured.
_WORKING = {"deflated-pca": 56}
_WORKING_OTHERS = 40
_VERDICT = 28
_CLUSTER = {"cav-class": 4, "cav-kmeans": 16}  # and this many more for each class or cluster
_TASK_VECTOR = 16  # bytes an entry of the weight, while its coefficients are found
_KRYLOV = 16 * 1024  # bytes a feature


@dataclass(frozen=True)
class Grams:
    """How many Gram matrices a layer has while it is read and judged, and later while its edit is computed."""

    reading: int = 1
    solving: int = 1
    rows: int = 0  # that are kept beside them
    sums_reading: int = 0  # class sums beside them
    sums_solving: int = 0


@dataclass(frozen=True)
class Cost:
    """The bytes of layers that share their input, whose statistics are one."""

    layers: tuple[str, ...]
    features: int
    reading: int  # statistics
    solving: int
    judging: int = 0  # linear algebra
    working: int = 0

    @property
    def bytes(self) -> int:
        """The most that is held at one time."""
        return max(self.reading + self.judging, self.solving + self.working)


@dataclass(frozen=True)
class Group:
    """Layers that are read in one pass over the data and finished before the next."""

    costs: tuple[Cost, ...]

    @property
    def layers(self) -> list[str]:
        return [name for cost in self.costs for name in cost.layers]

    @property
    def bytes(self) -> int:
        """The most that is held at one time beside the model and the activations of a batch."""
        return reduce(_together, self.costs).bytes


@dataclass(frozen=True)
class Plan:
    """The passes of a request, and what they take; print it to see them."""

    groups: tuple[Group, ...]
    memory: int | None = None

    @property
    def bytes(self) -> int:
        return max(group.bytes for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        passes = [{"layers": group.layers, "bytes": group.bytes} for group in self.groups]
        return {"memory": self.memory, "bytes": self.bytes, "passes": passes}

    def __str__(self) -> str:
        rows = [
            [
                str(place),
                listing(group.layers, 2),
                str(max(cost.features for cost in group.costs)),
                in_words(sum(cost.reading for cost in group.costs)),
                in_words(max(cost.working for cost in group.costs)),
                in_words(group.bytes),
            ]
            for place, group in enumerate(self.groups, start=1)
        ]
        count = len(self.groups)
        limit = "" if self.memory is None else f" of {in_words(self.memory)}"
        return (
            f"{count} pass{'es' if count > 1 else ''} over the data, at most {in_words(self.bytes)}{limit} beside the "
            "model and the activations of a batch\n"
            + text_table(["pass", "layers", "widest input", "statistics", "linear algebra", "in all"], rows)
        )


def bytes_of(memory: int | str) -> int:
    """A number of bytes from a number or from words such as '8GB' or '500MiB'."""
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(memory).upper())
    if isinstance(memory, str) and found is not None and found[2] in _UNITS and float(found[1]) > 0:
        return int(float(found[1]) * _UNITS[found[2]])
    raise DataError(f"memory={memory!r} is not a number of bytes or text such as '8GB' or '500MiB'.")


def in_words(size: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def grams_of(recipe: Recipe, classes: int, retained: int, with_verdict: bool) -> Grams:
    """The Gram matrices of a request: forget, retain, a random control, and what the recipe's basis adds.

    classes, retained: how many labels forget and retain have; each pool has the sums of its own.
    """
    forget = classes + 1 if recipe.basis == "cav-class" else 1
    limited = recipe.max_points is not None and recipe.basis in _CLUSTER
    solving = (forget + 1) * (2 if limited else 1)
    rows = (recipe.max_points or 8192) if recipe.basis == "cav-kmeans" else 0
    sums = classes + retained + (classes if limited and recipe.basis == "cav-class" else 0)
    return Grams(solving + with_verdict, solving, rows, sums + retained * with_verdict, sums)


def costs_of(
    model: nn.Module,
    names: Iterable[str],
    leaders: Mapping[str, str],
    grams: Grams,
    recipe: Recipe | None = None,
    classes: int = 0,
) -> list[Cost]:
    """What each set of layers that share their input takes; without a recipe nothing is solved.

    classes: those of the forget set, of which some bases make a cluster each.
    """
    sharing: dict[str, list[str]] = {}
    for name in names:
        sharing.setdefault(leaders.get(name, name), []).append(name)
    return [_cost(model, members, grams, recipe, classes) for members in sharing.values()]


def _cost(model: nn.Module, members: list[str], grams: Grams, recipe: Recipe | None, classes: int) -> Cost:
    first = layer_of(model, members[0])
    weight = weight_matrix(first, first.get_parameter("weight"))  # its shape: a model on the meta device has no more
    groups, features = (weight.shape[0] if weight.dim() == 3 else 1), weight.shape[-1]
    wide = max(4, weight.element_size())  # half-precision inputs are summed in float32
    gram = groups * features**2 * wide
    rows = groups * features * wide * grams.rows
    class_sum = (groups * features + 1) * 8  # and its rows' number
    reading = grams.reading * gram + grams.sums_reading * class_sum + rows
    solving = grams.solving * gram + grams.sums_solving * class_sum + rows
    if recipe is None:
        return Cost(tuple(members), features, reading, solving)
    # Groups are solved one after the other.
    square = features**2 * wide // 4
    clusters = classes if recipe.basis == "cav-class" else recipe.rank
    factor = _WORKING.get(recipe.basis, _WORKING_OTHERS) + clusters * _CLUSTER.get(recipe.basis, 0)
    entries = max(layer_of(model, name).get_parameter("weight").numel() for name in members)
    judging = square * _VERDICT if grams.reading > grams.solving else 0
    working = max(square * factor + _KRYLOV * features, _TASK_VECTOR * entries)
    return Cost(tuple(members), features, reading, solving, judging, working)


def plan_within(costs: Sequence[Cost], memory: int | None) -> Plan:
    """As few groups of consecutive layers as fit the memory, filled evenly."""
    if memory is None:
        return Plan((Group(tuple(costs)),))
    largest = max(costs, key=lambda cost: cost.bytes)
    if largest.bytes > memory:
        raise DataError(
            f"memory={in_words(memory)} is too little for layer {largest.layers[0]!r} alone: with {largest.features} "
            f"inputs it takes {in_words(largest.bytes)}. Pass memory={_rounded_up(largest.bytes)!r} or more, or leave "
            "the layer out with layers=..."
        )
    passes = len(_filled(costs, memory))
    low, high = largest.bytes, memory
    while low < high:  # the smallest bound that needs no more passes
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, middle)) <= passes else (middle + 1, high)
    return Plan(_filled(costs, high), memory)


def _filled(costs: Sequence[Cost], bound: int) -> tuple[Group, ...]:
    """The costs in order, each in the last group where that still fits."""
    groups: list[list[Cost]] = []
    total = Cost((), 0, 0, 0)
    for cost in costs:
        joined = _together(total, cost)
        if groups and joined.bytes <= bound:
            groups[-1].append(cost)
            total = joined
        else:
            groups.append([cost])
            total = cost
    return tuple(Group(tuple(group)) for group in groups)


def _together(first: Cost, second: Cost) -> Cost:
    """Statistics are held side by side, linear algebra is done one after the other."""
    return Cost(
        (),
        max(first.features, second.features),
        first.reading + second.reading,
        first.solving + second.solving,
        max(first.judging, second.judging),
        max(first.working, second.working),
    )


def _rounded_up(size: int) -> str:
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{-(-size * 10 // unit) / 10:g}{name}"
