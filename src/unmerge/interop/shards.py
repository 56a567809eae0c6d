"""Checkpoint: the safetensors files of a Hugging Face directory, read and rewritten one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unmerge.errors import FileError, listing
from unmerge.storage.files import opened, read_weight_map

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a file of the directory, and its name in there."""

    file: str
    name: str


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a directory by name, each read when it is asked for."""

    def __init__(self, directory: Path, places: Mapping[str, Place]) -> None:
        self.directory, self.places = directory, places

    @staticmethod
    def of(directory: Path) -> Checkpoint:
        """The checkpoint in a directory, its index checked against its files."""
        if (directory / SINGLE).is_file():
            names = _names_in(directory / SINGLE)
            return Checkpoint(directory, {name: Place(SINGLE, name) for name in names})
        if (directory / INDEX).is_file():
            return Checkpoint(directory, {name: Place(file, name) for name, file in _indexed(directory).items()})
        raise FileError(_not_a_checkpoint(directory))

    @property
    def files(self) -> list[str]:
        """The files that hold tensors."""
        return list(dict.fromkeys(place.file for place in self.places.values()))

    def outline(self, name: str) -> Tensor:
        """A tensor of the same shape without values, for which nothing but the file's header is read."""
        place = self.places[name]
        with opened(self.directory / place.file) as (file, _):
            return torch.empty(file.get_slice(place.name).get_shape(), device="meta")

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        with opened(self.directory / place.file) as (file, _):
            tensor: Tensor = file.get_tensor(place.name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def copy_file(source: Path, target: Path) -> None:
    """A copy of the content, on the disk when this returns."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with open(target, "rb") as written:
        os.fsync(written.fileno())


@contextmanager
def overwriting(path: Path) -> Iterator[Callable[[str, Tensor], None]]:
    """A function that puts new bytes in the place of a tensor of a safetensors file; every other byte stays."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))

        def put(name: str, value: Tensor) -> None:
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            start, end = header[name]["data_offsets"]
            if end - start != raw.nbytes:
                raise FileError(f"{name} takes {raw.nbytes} bytes, and {path} has {end - start} for it.")
            file.seek(8 + length + start)
            file.write(raw.data)

        yield put
        file.flush()
        os.fsync(file.fileno())


def _names_in(path: Path) -> list[str]:
    with opened(path) as (file, _):
        return list(file.keys())


def _indexed(directory: Path) -> dict[str, str]:
    """The file of each tensor by the index, which must say what the files hold."""
    path = directory / INDEX
    places = read_weight_map(path)
    files = sorted(set(places.values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise FileError(f"{path} names {listing(missing)}, which are not there. Download the checkpoint again.")
    unlisted = [shard.name for shard in sorted(directory.glob("model-*-of-*.safetensors")) if shard.name not in files]
    if unlisted:
        raise FileError(f"{path} does not name {listing(unlisted)}: the index belongs to another checkpoint.")
    held = {name: file for file in files for name in _names_in(directory / file)}
    astray = [
        f"{name} ({places.get(name, 'nowhere')} by the index, {held.get(name, 'nowhere')} in truth)"
        for name in dict.fromkeys([*places, *held])
        if places.get(name) != held.get(name)
    ]
    if astray:
        raise FileError(f"{path} does not say what the files hold: {listing(astray, 4)}.")
    return places


def _not_a_checkpoint(directory: Path) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}."
    if any(directory.glob("*.bin")):
        return (
            f"{directory} holds its weights as pickles (.bin), which run code when they are read. Write them as "
            "safetensors first: from_pretrained(directory).save_pretrained(new_directory)."
        )
    if (directory / "adapter_model.safetensors").is_file():
        return f"{directory} is a PEFT adapter, not a model. Pass the directory of its base."
    return f"{directory} holds no checkpoint: expected {SINGLE} or {INDEX} in it."
