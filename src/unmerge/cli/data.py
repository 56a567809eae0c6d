"""Data sources: an image folder, an .npz, a Hugging Face dataset on disk, or `package.module:function`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from unmerge.cli import images
from unmerge.cli.images import Preprocessing
from unmerge.cli.models import FUNCTION, call
from unmerge.cli.parts import LABELS, Source
from unmerge.data.batches import check_iterable
from unmerge.errors import DataError, FileError, listing

if TYPE_CHECKING:
    from PIL.Image import Image

_INPUTS = ("images", "inputs", "pixel_values", "x")
_NAMES = ("names", "class_names")


class Arrays(Source):
    """An .npz: inputs and labels. Bytes are images and are normalised; numbers are given to the model as they are."""

    def __init__(self, path: Path, prepare: Preprocessing) -> None:
        arrays = _read_npz(path)
        self._prepare = prepare
        self.names = dict(enumerate(map(str, _first(arrays, _NAMES, default=[]))))
        labels = _first(arrays, LABELS, default=None)
        self._mapping = {}
        if "input_ids" in arrays:
            keys = [key for key in arrays if key not in (*LABELS, *_NAMES)]
            self._mapping = {key: torch.from_numpy(arrays[key]) for key in keys}
            self._array = arrays["input_ids"]
        else:
            self._array = _first(arrays, _INPUTS, default=None)
            if self._array is None:
                found = listing(arrays)
                raise DataError(f"{path} has no array of inputs: it holds {found}; expected one of {listing(_INPUTS)}.")
        if self._array.ndim < 2 or not len(self._array):
            raise DataError(f"{path}: the inputs have shape {self._array.shape}; expected a row for each sample.")
        if labels is not None:
            if labels.ndim != 1 or len(labels) != len(self._array) or labels.dtype.kind not in "iu":
                raise DataError(
                    f"{path}: the labels are {labels.dtype}{list(labels.shape)}; expected {len(self._array)} integers."
                )
            self.labels = torch.from_numpy(labels.astype(np.int64))
        self.identity = _hash(path.read_bytes(), prepare.identity)

    def __len__(self) -> int:
        return len(self._array)

    def inputs(self, places: Sequence[int]) -> Any:
        if self._mapping:
            return {key: value[places] for key, value in self._mapping.items()}
        chosen = self._array[list(places)]
        if chosen.dtype != np.uint8 or chosen.ndim not in (3, 4):
            kind = np.float32 if chosen.dtype.kind == "f" else np.int64
            return torch.from_numpy(chosen.astype(kind, copy=False))
        pixels = self._pixels(chosen)
        if self._prepare.processor is not None or self._prepare.size is not None:
            pictures = [images.picture_of(image) for image in pixels]
            return self._prepare([picture for picture in pictures if picture is not None])
        return self._prepare.normalised(pixels)

    def _pixels(self, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(n, height, width, channels), with as many channels as the model takes."""
        pixels = chosen[..., None] if chosen.ndim == 3 else chosen
        if pixels.shape[-1] not in (1, 3) and pixels.shape[1] in (1, 3):
            pixels = pixels.transpose(0, 2, 3, 1)
        return np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 and self._prepare.channels == 3 else pixels

    def picture(self, place: int) -> Image | None:
        return None if self._mapping else images.picture_of(self._array[place])


class Folder(Source):
    """A folder of images with a subfolder for each class."""

    def __init__(self, path: Path, prepare: Preprocessing, model_names: Mapping[int, str], workers: int) -> None:
        images.need_pillow()
        classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        place_of = _places_of(classes, model_names)
        self.names = {place: name for name, place in place_of.items()}
        self._prepare, self._workers = prepare, workers
        found = [
            (file, place_of[name])
            for name in classes
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in images.SUFFIXES and file.is_file()
        ]
        if not found:
            raise DataError(
                f"{path} holds no images in subfolders: expected one subfolder a class, with files such as .png or "
                ".jpg in it."
            )
        self._files = [file for file, _ in found]
        self.labels = torch.tensor([label for _, label in found])
        stats = [file.stat() for file in self._files]
        listed = "\n".join(
            f"{file.relative_to(path)} {label} {stat.st_size} {stat.st_mtime_ns}"
            for (file, label), stat in zip(found, stats, strict=True)
        )
        self.identity = _hash(listed.encode(), prepare.identity)

    def __len__(self) -> int:
        return len(self._files)

    def inputs(self, places: Sequence[int]) -> Tensor:
        files = [self._files[place] for place in places]
        with ThreadPoolExecutor(self._workers) as pool:  # decoding leaves Python's lock
            return self._prepare(list(pool.map(images.opened, files)))

    def picture(self, place: int) -> Image | None:
        return images.opened(self._files[place])


class OnDisk(Source):
    """A Hugging Face dataset that was written with save_to_disk."""

    def __init__(self, path: Path, prepare: Preprocessing, split: str | None) -> None:
        try:
            import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ModuleNotFoundError as error:
            raise FileError(f"{path} is a Hugging Face dataset. Type: pip install datasets") from error
        try:
            data = datasets.load_from_disk(str(path))
        except Exception as error:  # datasets raises many kinds for a damaged directory
            raise FileError(f"{path} cannot be read as a dataset: {error}") from error
        if isinstance(data, Mapping):
            if split not in data:
                raise DataError(f"{path} has the splits {listing(data)}. Name one: {path}#{next(iter(data))}")
            data = data[split]
        self._data, self._prepare = data, prepare
        image, label = (next((key for key in keys if key in data.features), None) for keys in (_COLUMNS, LABELS))
        if image is None:
            raise DataError(f"{path} has the columns {listing(data.features)}; expected one of {listing(_COLUMNS)}.")
        self._column = image
        self.names = {}
        if label is not None:
            kind = data.features[label]
            if "int" not in getattr(kind, "dtype", ""):
                raise DataError(f"{path}: the column {label} holds {kind}; expected a ClassLabel or integers.")
            self.labels = torch.tensor(data[label][:], dtype=torch.int64)
            self.names = dict(enumerate(getattr(kind, "names", None) or []))
        self.identity = _hash(str(data._fingerprint).encode(), prepare.identity)

    def __len__(self) -> int:
        return len(self._data)

    def inputs(self, places: Sequence[int]) -> Any:
        values = self._data[list(places)][self._column]
        if hasattr(values[0], "convert"):
            return self._prepare(values)
        return torch.tensor(values)

    def picture(self, place: int) -> Image | None:
        found = self._data[place][self._column]
        return found if hasattr(found, "convert") else images.picture_of(torch.tensor(found))


_COLUMNS = ("image", "img", *_INPUTS)


def source_of(
    reference: str, prepare: Preprocessing, model_names: Mapping[int, str], workers: int
) -> Source | Iterable[Any]:
    """The source that a reference names, or the batches that a user's function returns."""
    place, _, split = reference.partition("#")
    path = Path(place).expanduser()
    if path.is_file():
        if path.suffix != ".npz":
            raise FileError(f"{path} is no data that can be read: expected an .npz, a .jsonl or a folder.")
        return Arrays(path, prepare)
    if path.is_dir():
        marks = ("state.json", "dataset_info.json", "dataset_dict.json")
        if any((path / mark).is_file() for mark in marks):
            return OnDisk(path, prepare, split or None)
        return Folder(path, prepare, model_names, workers)
    if FUNCTION.fullmatch(reference):
        data: Iterable[Any] = call(reference)
        check_iterable(data, reference)
        if isinstance(data, Iterator):
            raise DataError(f"{reference} returned a one-shot iterator; expected a DataLoader or a list of batches.")
        return data
    raise FileError(
        f"there is no data {reference!r}: expected an .npz, a .jsonl, a folder, or package.module:function."
    )


def _places_of(classes: list[str], model_names: Mapping[int, str]) -> dict[str, int]:
    """Subfolders by the model's own names of its classes, by number, or in order."""
    known = {name: place for place, name in model_names.items()}
    if all(name in known for name in classes):
        return {name: known[name] for name in classes}
    if all(name.isdecimal() for name in classes):
        return {name: int(name) for name in classes}
    if known:
        strange = [name for name in classes if name not in known]
        raise DataError(
            f"the subfolders {listing(strange)} are no classes of the model, which has {listing(known)}. Name them so, "
            "or by the numbers of the classes."
        )
    return {name: place for place, name in enumerate(classes)}


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (ValueError, OSError, BadZipFile, EOFError) as error:
        raise FileError(f"{path} cannot be read as arrays (no pickled objects): {error}") from error


def _first(arrays: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
    return next((arrays[key] for key in keys if key in arrays), default)


def _hash(content: bytes, preparation: str) -> str:
    return hashlib.sha256(content + preparation.encode()).hexdigest()
