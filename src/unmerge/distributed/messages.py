"""Messages between processes, over gloo: there, one that ends is seen at once, and one that is slow is waited for."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unmerge.errors import RankError

# Of a process that has failed or is done, for the others: they may be in the middle of a pass.
PATIENCE = timedelta(seconds=60)
Entry = dict[str, Any]


@dataclass
class _State:
    control: tuple[Any, Any] | None = None  # the default group, and the gloo group beside it
    timeout: timedelta | None = None


_state = _State()


def wait_at_most(timeout: timedelta) -> None:
    """How long a group that is still to be made waits for a process."""
    _state.timeout = timeout


def control_group() -> Any:
    """The default group where it is a gloo group, or else one beside it."""
    default = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return default
    if _state.control is None or _state.control[0] is not default:
        _state.control = (default, dist.new_group(backend="gloo", timeout=_state.timeout))
    return _state.control[1]


def told(entry: Entry, patience: timedelta | None = None) -> list[Entry]:
    """What every process tells, by rank: each tells the first one, which tells all, so each learns which is gone."""
    if dist.get_rank() == 0:
        return _heard_by_first(entry, patience)
    group = control_group()
    try:
        _send(json.dumps(entry), 0, group, patience)
        return json.loads(_receive(0, group, patience))
    except RuntimeError as error:
        raise gone("the first process") from error


def tell_failure(reason: str) -> bool:
    """Say why this process ends to those that wait for it, or soon will: whether the first one has heard it.

    The others see that this one is gone.
    """
    entry, group = {"failure": reason}, control_group()
    if dist.get_rank() == 0:
        _heard_by_first(entry, PATIENCE)
        return True
    try:
        _send(json.dumps(entry), 0, group, PATIENCE)
    except RuntimeError:
        return False
    return True


def are_all_here() -> bool:
    """Whether all processes have come this far, or come within a minute."""
    try:
        return all("value" in entry for entry in told({"value": None}, PATIENCE))
    except RankError:
        return False


def gone(who: str) -> RankError:
    return RankError(
        f"{who} has ended, or has not answered in time; look at its output. Every process must make the same calls: "
        "one that is to work by itself does so inside `with unmerge.distributed.alone():`."
    )


def _heard_by_first(own: Entry, patience: timedelta | None) -> list[Entry]:
    """What the first process hears from the others, and passes on to them."""
    group, entries = control_group(), [json.loads(json.dumps(own))]  # in the form in which the others have it
    for place in range(1, dist.get_world_size()):
        try:
            entries.append(json.loads(_receive(place, group, patience)))
        except RuntimeError:
            entries.append({"gone": True})
    text = json.dumps(entries)
    for place, entry in enumerate(entries):
        if place and "value" in entry:  # what has failed does not listen
            with suppress(RuntimeError):  # it is gone, as the others are told
                _send(text, place, group, patience)
    return entries


def _send(text: str, place: int, group: Any, patience: timedelta | None = None) -> None:
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for part in (torch.tensor([len(content)]), content):
        _done(dist.isend(part, place, group=group), patience)


def _receive(place: int, group: Any, patience: timedelta | None = None) -> str:
    length = torch.zeros(1, dtype=torch.int64)
    _done(dist.irecv(length, place, group=group), patience)
    content = torch.zeros(int(length), dtype=torch.uint8)
    _done(dist.irecv(content, place, group=group), patience)
    return content.numpy().tobytes().decode()


def _done(work: Any, patience: timedelta | None) -> None:
    work.wait() if patience is None else work.wait(patience)
