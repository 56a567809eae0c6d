"""How much memory a request takes, and in how many passes over the data it fits into less."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from unmerge.errors import DataError, listing
from unmerge.planning.costs import Cost
from unmerge.tables import text_table

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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

    @property
    def sketches(self) -> dict[str, int]:
        """The layers whose Gram does not fit, and the size of the sketch in its place."""
        return {
            name: cost.sketch for group in self.groups for cost in group.costs if cost.sketch for name in cost.layers
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        passes = [{"layers": group.layers, "bytes": group.bytes} for group in self.groups]
        return {"memory": self.memory, "bytes": self.bytes, "passes": passes, "sketches": self.sketches}

    def __str__(self) -> str:
        rows = [
            [
                str(place),
                listing(group.layers, 2),
                str(max(cost.features for cost in group.costs)),
                *([] if not self.sketches else [", ".join(str(cost.sketch) for cost in group.costs if cost.sketch)]),
                in_words(sum(cost.reading + cost.counting for cost in group.costs)),
                in_words(max(cost.working for cost in group.costs)),
                in_words(group.bytes),
            ]
            for place, group in enumerate(self.groups, start=1)
        ]
        columns = ["pass", "layers", "widest input", *(["sketch"] if self.sketches else []), "statistics"]
        count = len(self.groups)
        limit = "" if self.memory is None else f" of {in_words(self.memory)}"
        return (
            f"{count} pass{'es' if count > 1 else ''} over the data, at most {in_words(self.bytes)}{limit} beside the "
            "model and the activations of a batch\n" + text_table([*columns, "linear algebra", "in all"], rows)
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


def plan_within(costs: Sequence[Cost], memory: int | None) -> Plan:
    """As few groups of consecutive layers as fit the memory, filled evenly."""
    if memory is None:
        return Plan((Group(tuple(costs)),))
    largest = max(costs, key=lambda cost: cost.bytes)
    if largest.bytes > memory:
        least = f" even as the smallest sketch (size {largest.sketch})" if largest.sketch else ""
        raise DataError(
            f"memory={in_words(memory)} is too little for layer {largest.layers[0]!r} alone: with {largest.features} "
            f"inputs it takes {in_words(largest.bytes)}{least}. Pass memory={_rounded_up(largest.bytes)!r} or more, or "
            "leave the layer out with layers=..."
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
        first.counting + second.counting,
        max(first.settling, second.settling),
        max(first.judging, second.judging),
        max(first.working, second.working),
    )


def _rounded_up(size: int) -> str:
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{-(-size * 10 // unit) / 10:g}{name}"
