"""CIFAR-100 from a folder: its images, the names of its classes, and the requests that the paper makes of it."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmerge.bench.images import Images
from unmerge.errors import DataError, FileError, suggest

PAPER = {"aquatic": "aquatic_mammals", "vehicles": "vehicles_1"}  # its tasks, by superclass
_SIDE = 32
_TILES = 100  # mosaics hold 100 x 100 images


@dataclass(frozen=True)
class Cifar100:
    """Training and test images, and the names by which requests are made."""

    train: Images
    test: Images
    classes: list[str]
    superclass_of: list[str]  # of each class

    def classes_of(self, request: str) -> list[int]:
        """The labels of a superclass ("trees"), a class ("oak_tree"), or several of them with + between."""
        found: list[int] = []
        for name in request.lower().replace(" ", "_").split("+"):
            name = name.removeprefix("superclass:").removeprefix("class:")
            of_super = [label for label, group in enumerate(self.superclass_of) if group == name]
            known = [*self.classes, *dict.fromkeys(self.superclass_of)]
            if name not in known:
                among = f"among the {len(self.classes)} classes that are read"
                raise DataError(f"there is no class or superclass {name!r} {among}. {suggest(name, known)}")
            found += of_super or [self.classes.index(name)]
        return sorted(set(found))

    def first(self, count: int) -> Cifar100:
        """Only the first images of each class."""

        def part(data: Images) -> Images:
            order = data.labels.argsort(stable=True)
            place = torch.arange(len(order), device=order.device) % (len(order) // len(self.classes))
            return data.where(order[place < count].sort().values)

        return replace(self, train=part(self.train), test=part(self.test))

    def subset(self, classes: list[int]) -> Cifar100:
        """Only some classes, relabelled 0, 1, ... in ascending order."""
        kept = torch.tensor(sorted(classes))

        def part(data: Images) -> Images:
            chosen = data.only(kept.tolist())
            return Images(chosen.images, torch.searchsorted(kept.to(chosen.labels.device), chosen.labels))

        names, groups = ([values[label] for label in kept.tolist()] for values in (self.classes, self.superclass_of))
        return Cifar100(part(self.train), part(self.test), names, groups)

    def to(self, device: torch.device | str) -> Cifar100:
        return Cifar100(self.train.to(device), self.test.to(device), self.classes, self.superclass_of)


def requested(data: Cifar100, task: str) -> tuple[Tensor, tuple[int, ...]]:
    """Which training images a task forgets, the same ones for every seed of training, and the classes that go."""
    labels = data.train.labels
    generator = torch.Generator().manual_seed(0)
    if task == "random":
        order = torch.randperm(len(labels), generator=generator)[: len(labels) // 20]
        return torch.zeros(len(labels), dtype=torch.bool).index_fill_(0, order, True).to(labels.device), ()
    if task == "coherent":
        trees = data.train.has(data.classes_of("trees"))
        half = torch.rand(len(labels), generator=generator) < 0.5
        return trees & half.to(labels.device), ()
    classes = data.classes_of(PAPER.get(task, task))
    if len(classes) == len(data.classes):
        raise DataError(f"--task {task} forgets every class. Name fewer, or more with --classes.")
    return data.train.has(classes), tuple(classes)


def load(folder: str | Path) -> Cifar100:
    """The data set from torchvision's `cifar-100-python` folder, or from WebP mosaics with labels.npz."""
    folder = Path(folder)
    python = folder / "cifar-100-python" if (folder / "cifar-100-python").is_dir() else folder
    if (python / "meta").is_file():
        raw = _from_pickles(python)
    elif (folder / "labels.npz").is_file():
        raw = _from_mosaics(folder)
    else:
        raise FileError(
            f"{folder} holds no CIFAR-100: expected torchvision's 'cifar-100-python' with train, test and meta, or "
            "part0.webp to part5.webp with labels.npz."
        )
    train_images, test_images, fine_train, fine_test, coarse_train, fine_names, coarse_names = raw
    superclass_of = [""] * len(fine_names)
    for fine, coarse in zip(fine_train, coarse_train, strict=True):
        superclass_of[int(fine)] = str(coarse_names[int(coarse)]).lower().replace(" ", "_")
    pixels = torch.from_numpy(np.ascontiguousarray(train_images)).permute(0, 3, 1, 2).float() / 255
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
    others = torch.from_numpy(np.ascontiguousarray(test_images)).permute(0, 3, 1, 2).float() / 255
    return Cifar100(
        Images((pixels - mean) / deviation, torch.as_tensor(np.asarray(fine_train), dtype=torch.int64)),
        Images((others - mean) / deviation, torch.as_tensor(np.asarray(fine_test), dtype=torch.int64)),
        [str(name).lower() for name in fine_names],
        superclass_of,
    )


def _from_mosaics(folder: Path) -> tuple[Any, ...]:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None

    def tiles(part: int) -> np.ndarray:
        pixels = np.asarray(Image.open(folder / f"part{part}.webp").convert("RGB"))
        grid = pixels.reshape(_TILES, _SIDE, _TILES, _SIDE, 3).transpose(0, 2, 1, 3, 4)
        return grid.reshape(-1, _SIDE, _SIDE, 3)

    with np.load(folder / "labels.npz") as labels:
        names = [labels[key] for key in labels.files if "name" in key]
        fine_names, coarse_names = sorted(names, key=len, reverse=True)
        found = [labels[f"{kind}_{part}"] for kind, part in (("fine", "train"), ("fine", "test"), ("coarse", "train"))]
    return np.concatenate([tiles(part) for part in range(5)]), tiles(5), *found, fine_names, coarse_names


def _from_pickles(folder: Path) -> tuple[Any, ...]:
    train, test, meta = (_unpickled(folder / name) for name in ("train", "test", "meta"))

    def images(part: dict[str, Any]) -> np.ndarray:
        return part["data"].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)

    return (
        images(train),
        images(test),
        train["fine_labels"],
        test["fine_labels"],
        train["coarse_labels"],
        meta["fine_label_names"],
        meta["coarse_label_names"],
    )


class _ArraysOnly(pickle.Unpickler):
    """CIFAR-100 is distributed as pickles; nothing but numpy arrays may come out of them."""

    _ALLOWED = frozenset(
        (module, name)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy")
        for name in ("_reconstruct", "ndarray", "dtype")
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # how a pickle of protocol 2 holds bytes
            return lambda text, _: text.encode("latin-1")
        raise FileError(f"a CIFAR-100 file holds {module}.{name}, which is no array; it is not read.")


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        found = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        return {key.decode() if isinstance(key, bytes) else str(key): _decoded(value) for key, value in found.items()}
    except (pickle.UnpicklingError, AttributeError, EOFError, OSError) as error:
        raise FileError(f"{path} cannot be read as a part of CIFAR-100: {error}.") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [entry.decode() if isinstance(entry, bytes) else entry for entry in value]
    return value
