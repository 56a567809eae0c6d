"""Ending a forward pass where nothing more is wanted of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any

from torch import nn

from unmerge.model.shorthands import block_with, blocks_of
from unmerge.placement.sharded import is_sharded


class _Enough(BaseException):
    """Raised inside a forward pass; no `except Exception` on the way out is meant to see it."""


class LastBlock:
    """The block of a transformer behind which no wanted layer is called: from the second batch on, passes end there."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._block: nn.Module | None = None
        self._is_proven = False
        self._returns = 0
        self._called_behind = False
        blocks = blocks_of(model)
        owners = [block_with(name, blocks) for name in names]
        # Offloaded and sharded weights are put away by hooks that an ended pass would not reach.
        is_placed = is_sharded(model) or any(hasattr(module, "_hf_hook") for module in model.modules())
        if owners and None not in owners and not is_placed:
            self._block = blocks[max((owner for owner in owners if owner), key=list(blocks).index)]

    def note_call(self) -> None:
        """A wanted layer was called."""
        self._called_behind |= self._returns > 0

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Run a forward pass inside; the first one is whole and shows whether later ones may end early."""
        if self._block is None:
            yield
            return
        self._returns = 0
        handle = self._block.register_forward_hook(self._returned)
        try:
            yield
        except _Enough as enough:
            # Some wrappers around a forward pass hold on to what is raised in them, and with it to its activations.
            # From Python 3.12 on so does the context manager that this is: its frame is behind the one that caught it.
            clear_frames(enough.__traceback__)
            enough.__traceback__ = None
        finally:
            handle.remove()
        self._is_proven = self._returns == 1 and not self._called_behind

    def _returned(self, *_: Any) -> None:
        self._returns += 1
        if self._is_proven:
            raise _Enough
