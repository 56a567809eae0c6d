"""Seconds of the steps of a benchmark, each made several times, and how many operations a step launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unmerge.evaluation import Column, Figure, Table

Result = TypeVar("Result")


class Stopwatch:
    """The seconds of each step, as often as it was made; "request: passes" is a part of "request"."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        own = self.seconds.setdefault(step, [])  # now, so that a whole stands before its parts
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        own.append(time.perf_counter() - start)

    def made(self, step: str, work: Callable[[], Result], repeats: int = 1) -> Result:
        """What some work returns, timed as a step."""
        for _ in range(repeats):
            with self(step):
                result = work()
        return result

    def note(self, step: str, phases: Mapping[str, float]) -> None:
        """What the work itself has timed of a step, as its parts."""
        for phase, value in phases.items():
            self.seconds.setdefault(f"{step}: {phase}", []).append(value)

    def best(self, step: str) -> float:
        """The seconds of the quickest time; of a part those that it took of the quickest whole."""
        whole = self.seconds.get(step.partition(":")[0], self.seconds[step])
        return self.seconds[step][whole.index(min(whole))]

    def table(self, title: str, beside: Mapping[str, str], ratio: str) -> Table:
        """One row a step; `ratio` is the name of the column that compares some with another step."""
        rows = {}
        for step, found in self.seconds.items():
            rows[step] = {"seconds": Figure(self.best(step)), "slowest": Figure(max(found))}
            if step in beside:
                rows[step][ratio] = Figure(self.best(step) / self.best(beside[step]))
        return Table(title, [Column("seconds"), Column("slowest"), Column(ratio, digits=2)], rows)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def operations(work: Callable[[], object]) -> int:
    """How many operations some work launches: what a GPU waits for where each is small."""
    with _Counting() as counting:
        work()
    return counting.count


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))
