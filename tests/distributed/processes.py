"""Runs functions of scenarios.py in several real processes, joined by gloo, and brings back what they return."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scenarios
import torch
import torch.multiprocessing as multiprocessing

from unmerge import distributed

TIMEOUT = 120.0  # seconds


def run(world: int, names: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """For each process what each function returned, or the error that it raised as a string."""
    processes = start(world, names, folder)
    for process in processes:
        process.join(TIMEOUT)
    for process in processes:
        if process.is_alive():
            process.kill()
    found = []
    for rank in range(world):
        path = folder / f"{rank}.pt"
        found.append(torch.load(path, weights_only=True) if path.exists() else {})
    return found


def start(world: int, names: Sequence[str], folder: Path) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_work, args=(rank, world, port, list(names), folder)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def _work(rank: int, world: int, port: int, names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    # As torchrun does.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert distributed.start(TIMEOUT) == torch.device("cpu")
    found = {}
    for name in names:
        found[name] = attempt(name)
        torch.save(found, folder / f"{rank}.pt")


def attempt(name: str) -> Any:
    """What a function of scenarios.py returns, or the error that it raises as a string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(scenarios, name)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
