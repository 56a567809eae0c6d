"""What the tests of reliability share: the tiny model, how much is run, and how long and large a reader may be."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

# `make fuzz` sets it: this many times as many examples, and every kill point there is.
TIMES = int(os.environ.get("UNMERGE_FUZZ", "1"))
TESTS = Path(__file__).parents[1]
MODELS = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 10),
    )
"""
Task = Callable[..., dict[str, Any]]


def trained(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    names: dict[str, Any] = {}
    exec(MODELS, names)
    torch.manual_seed(0)
    model: nn.Module = names["build"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


@contextmanager
def bounded(seconds: int = 20, memory: int = 1 << 30) -> Iterator[None]:
    """Ends what hangs with TimeoutError, and what takes a gigabyte more than now with MemoryError or RuntimeError."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def tree(place: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
