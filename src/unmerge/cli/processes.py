"""The command in several processes, as torchrun and accelerate launch start it: the first one speaks and writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from unmerge.cli.console import INTERRUPTED
from unmerge.distributed.processes import alone, exchange, is_first, leave, start, together

Function = Callable[..., int | None]


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Inside the block the processes that a launcher started are one; none ends it before the first has spoken."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    start()
    with contextlib.ExitStack() as stack:
        if not is_first():
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            yield
        except SystemExit as end:
            # A launcher ends all processes when one has failed, also one that has still to say why.
            if end.code != INTERRUPTED:
                leave()
            raise


def shared(function: Function) -> Function:
    """The work of all processes together: what fails in one ends it in all, with the exit code of the first."""

    @together
    def work(*args: Any, **options: Any) -> int | None:
        return exchange(function(*args, **options))[0]

    return work


def of_first(function: Function) -> Function:
    """The work of the first process alone; the others have nothing to do."""

    def work(*args: Any, **options: Any) -> int | None:
        if not is_first():
            return None
        with alone():
            return function(*args, **options)

    return work
