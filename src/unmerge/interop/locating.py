"""Where the tensors of a model lie in a checkpoint that spells their names otherwise than the model does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor

from unmerge.errors import EditError
from unmerge.interop.shards import Checkpoint, Place
from unmerge.storage.fingerprint import fingerprint, kind_of


def located(checkpoint: Checkpoint, names: Iterable[str], checksums: Mapping[str, str]) -> Checkpoint:
    """The checkpoint, also under those of the names that it has in another spelling; what it lacks stays absent.

    A name may lack or have a beginning, as between a base model and one with a head. transformers also renames parts of
    some models when it loads them: such a tensor is known by its checksum, and the rest of its module by its side.
    """
    names = list(dict.fromkeys(names))
    places = {name: checkpoint.places[name] for name in names if name in checkpoint}
    lost = [name for name in names if name not in places]
    likely = {name: place for name in lost if (place := _by_beginning(name, checkpoint)) is not None}
    places |= {
        name: place
        for name, place in likely.items()
        if name in checksums and is_same(checkpoint[place.name], checksums[name])
    }
    unknown = {name: checksums[name] for name in lost if name not in places and name in checksums}
    places |= _by_checksum(checkpoint, unknown)
    for name in (name for name in lost if name not in places):
        place = _beside(name, places, checkpoint) or likely.get(name)
        if place is not None:
            places[name] = place
    _check_distinct(places, checkpoint)
    return Checkpoint(checkpoint.directory, {**checkpoint.places, **places})


def is_same(tensor: Tensor, checksum: str) -> bool:
    """Whether the checksum is of these values; in its type, since from_pretrained(..., dtype=...) may convert them."""
    return fingerprint({"": tensor.to(kind_of(checksum)[0])})[""] == checksum


def _by_beginning(name: str, checkpoint: Checkpoint) -> Place | None:
    """The only tensor whose name ends as this one does, where one of the two is the end of the other."""
    found = [
        stored
        for stored in checkpoint
        if f".{stored}".endswith(f".{name}") or ("." in stored and name.endswith(f".{stored}"))
    ]
    return checkpoint.places[found[0]] if len(found) == 1 else None


def _by_checksum(checkpoint: Checkpoint, unknown: Mapping[str, str]) -> dict[str, Place]:
    """The tensors that are told by a checksum which exactly one in the checkpoint has."""
    wanted = set(unknown.values())
    shapes = {kind_of(checksum)[1] for checksum in wanted}
    found: dict[str, list[str]] = defaultdict(list)
    for stored in checkpoint:
        if shapes and tuple(checkpoint.outline(stored).shape) in shapes:
            tensor = checkpoint[stored]
            for checksum in (checksum for checksum in wanted if is_same(tensor, checksum)):
                found[checksum].append(stored)
    return {
        name: checkpoint.places[found[checksum][0]] for name, checksum in unknown.items() if len(found[checksum]) == 1
    }


def _beside(name: str, places: Mapping[str, Place], checkpoint: Checkpoint) -> Place | None:
    """The tensor of the same part in the module where another part of this one's module lies."""
    module, _, part = name.rpartition(".")
    for other, place in places.items():
        if other.rpartition(".")[0] == module:
            return checkpoint.places.get(f"{place.name.rpartition('.')[0]}.{part}")
    return None


def _check_distinct(places: Mapping[str, Place], checkpoint: Checkpoint) -> None:
    taken: dict[Place, str] = {}
    for name, place in places.items():
        other = taken.setdefault(place, name)
        if other != name:
            raise EditError(f"{other} and {name} are the same tensor in {checkpoint.directory}: {place.name}.")
