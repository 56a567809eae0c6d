"""Which edits a model carries, and its weights from before: what makes revert bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from unmerge.distributed.warning import warn
from unmerge.errors import EditError, LayerError, StatisticsError, listing
from unmerge.placement.state import state_of
from unmerge.placement.writing import holding, write
from unmerge.storage.fingerprint import differences, fingerprint


class Change(Protocol):
    """What the ledger has to know of an edit."""

    def is_same(self, other: Any) -> bool:
        """Whether both make the same change."""

    def changes(self, state: Mapping[str, Tensor], alpha: float, head_alpha: float) -> dict[str, Tensor]:
        """The tensors of a state dict that it changes, with their new values."""


@dataclass
class Entry:
    """One edit as it was applied."""

    edit: Change
    alpha: float
    head_alpha: float
    recalibrated: tuple[str, ...] = ()  # tensors that recalibration replaced
    present: dict[str, Tensor] = field(default_factory=dict)  # all that it changed, from just before


@dataclass
class Ledger:
    """The edits of one model in order, the tensors from before, and checksums of what was written."""

    entries: list[Entry] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)


_ledgers: WeakKeyDictionary[nn.Module, Ledger] = WeakKeyDictionary()


def ledger_of(model: nn.Module) -> Ledger:
    if not isinstance(model, nn.Module):
        raise LayerError(
            f"the model is a {type(model).__name__}; expected an nn.Module. Look at the order of arguments."
        )
    return _ledgers.get(model, Ledger())


def entry_of(model: nn.Module, edit: Change) -> Entry | None:
    """The entry of an edit that the model carries, be it this object or the same edit read from its file again."""
    return next((entry for entry in ledger_of(model).entries if edit.is_same(entry.edit)), None)


@contextmanager
def change(model: nn.Module, entry: Entry) -> Iterator[Callable[[Iterable[str]], None]]:
    """Enter an edit into the ledger; yields a function that remembers tensors before they change.

    When the block fails, the model and its ledger are as they were.
    """
    ledger = _ledgers.setdefault(model, Ledger())
    state = state_of(model)
    fresh: list[str] = []
    present = entry.present

    def remember(names: Iterable[str]) -> None:
        for name in names:
            present.setdefault(name, state[name].detach().clone())
            if name not in ledger.before:
                fresh.append(name)
                ledger.before[name] = present[name]

    ledger.entries.append(entry)
    try:
        yield remember
    except BaseException:
        try:
            write(model, present)
        finally:
            for name in fresh:
                del ledger.before[name]
            ledger.entries.remove(entry)
            if not ledger.entries:
                del _ledgers[model]
        raise
    seal(model, ledger)


def seal(model: nn.Module, ledger: Ledger) -> None:
    """Note what the tensors hold now, so that a later change by others is seen."""
    state = state_of(model)
    ledger.written = fingerprint({name: state[name] for name in ledger.before})


def withdraw(model: nn.Module, edit: Change, force: bool) -> None:
    """Take one edit out: restore the tensors from before and apply the other edits to them again."""
    ledger = ledger_of(model)
    entry = entry_of(model, edit)
    if entry is None:
        raise EditError(
            "this model does not carry this edit, so there is nothing to revert. A copy of a model, or one that was "
            "loaded from disk, does not know which edits were applied to it."
        )
    state = state_of(model)
    other = [name for name, value in ledger.before.items() if name not in state or state[name].shape != value.shape]
    if other:
        raise EditError(
            f"{listing(other)} were replaced or have other shapes since the edit was applied, so what was there before "
            "cannot be put back. Put the former modules back in their places, or load the model again."
        )
    now = fingerprint({name: state[name] for name in ledger.before})
    changed = differences(now, ledger.written)
    if changed and not force:
        raise EditError(
            f"{listing(changed)} changed after the edit was applied; reverting would discard that. "
            "Pass force=True to restore the weights from before the edit."
        )
    if ledger.entries[-1] is entry:
        write(model, entry.present)
        ledger.entries.remove(entry)
        _settle(model, ledger)
        return
    others = [other for other in ledger.entries if other is not entry]
    lost = any(other.recalibrated for other in others)
    _rebuild(model, ledger, others)
    if lost:
        warn(
            "the BatchNorm statistics and classifier rows of the edits that stay were estimated with this one in place "
            "and are now those from before; apply them again with recalibrate=..."
        )


def set_aside(model: nn.Module) -> AbstractContextManager[None]:
    """The model as it was before the edits that it carries, inside the block."""
    return holding(model, ledger_of(model).before)


@contextmanager
def as_collected(model: nn.Module, weights: dict[str, str] | None) -> Iterator[bool]:
    """The model with the weights that statistics were collected with, where its edits are all that keeps it from them.

    Yields whether edits were set aside.
    """
    ledger = ledger_of(model)
    if weights is None or not ledger.entries:
        yield False
        return
    now = fingerprint(state_of(model))
    if not differences(now, weights):
        yield False
        return
    original = now | fingerprint(ledger.before)
    # Also a change of an edited tensor after the edit, which its value from before does not show.
    changed = [*differences(original, weights), *differences(now, ledger.written, ledger.written)]
    if changed:
        raise StatisticsError(
            f"these statistics were collected with other weights: {listing(dict.fromkeys(changed))} differ, apart from "
            "the edits that the model carries. Collect them again with this model."
        )
    with set_aside(model):
        yield True


def _rebuild(model: nn.Module, ledger: Ledger, entries: list[Entry]) -> None:
    """Write the tensors from before with these edits alone, each with what it now finds."""
    values = dict(ledger.before)
    rebuilt = []
    for entry in entries:
        changes = entry.edit.changes(values, entry.alpha, entry.head_alpha)
        rebuilt.append(replace(entry, recalibrated=(), present={name: values[name] for name in changes}))
        values.update(changes)
    write(model, values)
    ledger.entries[:] = rebuilt
    _settle(model, ledger)


def _settle(model: nn.Module, ledger: Ledger) -> None:
    """Forget the tensors that no remaining edit has changed, and note what the others hold."""
    touched = {name for entry in ledger.entries for name in entry.present}
    ledger.before = {name: value for name, value in ledger.before.items() if name in touched}
    if ledger.entries:
        seal(model, ledger)
    else:
        _ledgers.pop(model, None)
