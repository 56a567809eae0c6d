"""Several processes that work as one: each reads its share of the data, all end with the same result.

Where torch.distributed is initialised (torchrun, accelerate launch), `collect`, `fit`, `search_alpha` and `evaluate`
are called in every process alike. `start()` initialises it, `alone()` keeps one process out of it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unmerge.distributed.messages import are_all_here, control_group, gone, tell_failure, told, wait_at_most
from unmerge.errors import RankError

Value = TypeVar("Value")
Given = ParamSpec("Given")


@dataclass
class _State:
    alone: bool = False
    together: bool = False
    is_heard: bool = True


_state = _State()


def start(timeout: float = 1800.0) -> torch.device:
    """The device of this process, which has joined the others that torchrun or accelerate launch started.

    Without such a launcher nothing is joined. timeout: the seconds that a process waits for one that is slower.
    """
    devices = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local % devices) if devices else torch.device("cpu")
    if devices:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        # NCCL gives no device to two processes.
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > devices
        wait_at_most(timedelta(seconds=timeout))
        dist.init_process_group("gloo" if shared else "nccl", timeout=timedelta(seconds=timeout))
    return device


def leave() -> None:
    """Part from the other processes once all have come this far; from one that is gone or late there is no parting."""
    if size() > 1 and are_all_here():
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Inside the block this process works by itself, as if there were no others."""
    before, _state.alone = _state.alone, True
    try:
        yield
    finally:
        _state.alone = before


class OwnShare:
    """Batches that this process alone reads: the other processes' hold the other samples."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def size() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _state.alone else 1


def rank() -> int:
    """The place of this process among them."""
    return dist.get_rank() if size() > 1 else 0


def is_first() -> bool:
    """Whether this process writes files and shows progress."""
    return rank() == 0


def is_heard() -> bool:
    """Whether the first process has been told of what failed here, if anything did, so that it can say it."""
    return _state.is_heard


def together(work: Callable[Given, Value]) -> Callable[Given, Value]:
    """The function as several processes call it: what fails in one ends the others, at their next `exchange`."""

    @wraps(work)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        outermost, _state.together = not _state.together, True
        try:
            return work(*args, **kwargs)
        except RankError:  # which all of them have
            raise
        except Exception as error:
            if outermost and size() > 1:
                _state.is_heard = tell_failure(f"{type(error).__name__}: {error}")
            raise
        finally:
            _state.together = not outermost

    return call


def exchange(value: Value) -> list[Value]:
    """The plain values (as of JSON) that the processes give, by rank; an error where one of them has failed."""
    if size() == 1:
        return [value]
    found = told({"value": value})
    for place, entry in enumerate(found):
        if "gone" in entry:
            raise gone(f"process {place} of {size()}")
        if "failure" in entry:
            raise RankError(f"process {place} of {size()} failed, so this one ends too: {entry['failure']}")
    return [entry["value"] for entry in found]


def summed(*values: float) -> list[Any]:
    """The sums of the numbers that the processes give."""
    return [sum(column) for column in zip(*exchange(values), strict=True)]


def agreed(value: Value, what: str) -> Value:
    """The value that all processes have; an error where they differ, which says `what`."""
    found = exchange(value)
    for place, other in enumerate(found):
        if other != found[0]:
            raise RankError(f"{what}: process 0 has {found[0]}, process {place} has {other}.")
    return found[0]


def from_first(value: Value | None) -> Value | None:
    """The value, of any kind, of the first process that has one, in all of them."""
    if size() == 1:
        return value
    content = b"" if value is None else pickle.dumps(value)  # before the others are told that it comes
    sizes = exchange(len(content))
    source = next((place for place, length in enumerate(sizes) if length), None)
    return None if source is None else _sent(content, source, sizes[source])


def same_everywhere(value: Value) -> Value:
    """The first process's value in place of those of the others, which may differ in rounding."""
    found = from_first(value if is_first() else None)
    assert found is not None
    return found


def gathered(value: Value) -> list[Value]:
    """The values of any kind that the processes give, by rank."""
    if size() == 1:
        return [value]
    content = pickle.dumps(value)
    return [_sent(content, place, length) for place, length in enumerate(exchange(len(content)))]


def add_up_(tensor: Tensor, *others: Tensor) -> Tensor:
    """The sum of all processes' tensors, in place; the same bits in each of them. Small others go in one message."""
    if size() > 1:
        tensors = [tensor, *others]
        message = torch.cat([each.flatten() for each in tensors]) if others else tensor
        with _answering():
            dist.all_reduce(message, group=_group_of(message))
        if others:
            for each, part in zip(tensors, message.split([each.numel() for each in tensors]), strict=True):
                each.copy_(part.view_as(each))
    return tensor


def copy_first_(tensor: Tensor) -> Tensor:
    """The first process's tensor, in place."""
    if size() > 1:
        with _answering():
            dist.broadcast(tensor, src=0, group=_group_of(tensor))
    return tensor


def _sent(content: bytes, source: int, length: int) -> Any:
    """One process's value, known in all of them; it comes from none but these processes."""
    box = torch.frombuffer(bytearray(content if rank() == source else length), dtype=torch.uint8)
    with _answering():
        dist.broadcast(box, src=source, group=control_group())
    return pickle.loads(box.numpy().tobytes())


def _group_of(tensor: Tensor) -> Any:
    """NCCL moves what is on a GPU; gloo, which moves everything, the rest."""
    return None if tensor.is_cuda else control_group()


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise gone("another process") from error
