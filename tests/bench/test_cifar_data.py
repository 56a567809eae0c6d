"""Reading CIFAR-100 in both forms, and the requests that are made of it by name."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from unmerge.bench import cifar_data
from unmerge.errors import DataError, FileError

FINE = ["apple", "oak_tree", "maple_tree", "dolphin"]
COARSE = ["fruit_and_vegetables", "trees", "aquatic_mammals"]
GROUP = [0, 1, 1, 2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A few random images in torchvision's layout: pickles with bytes as keys."""
    target = tmp_path / "cifar-100-python"
    target.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 8)):
        fine = [place % 4 for place in range(count)]
        part = {
            b"data": generator.integers(0, 256, (count, 3072), dtype=np.uint8),
            b"fine_labels": fine,
            b"coarse_labels": [GROUP[label] for label in fine],
        }
        (target / name).write_bytes(pickle.dumps(part, protocol=2))
    names = {b"fine_label_names": [name.encode() for name in FINE], b"coarse_label_names": [n.encode() for n in COARSE]}
    (target / "meta").write_bytes(pickle.dumps(names, protocol=2))
    return tmp_path


def test_images_are_normalised_and_keep_their_order(folder: Path) -> None:
    data = cifar_data.load(folder)
    assert data.train.images.shape == (40, 3, 32, 32)
    assert data.test.labels.tolist() == [0, 1, 2, 3] * 2
    assert torch.allclose(data.train.images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(data.train.images.std((0, 2, 3)), torch.ones(3), atol=1e-3)
    raw = pickle.loads((folder / "cifar-100-python" / "train").read_bytes(), encoding="bytes")[b"data"][0]
    pixels = data.train.images[0] - data.train.images[0].mean()
    expected = torch.from_numpy(raw.reshape(3, 32, 32)).float()
    assert torch.corrcoef(torch.stack([pixels[0].flatten(), expected[0].flatten()]))[0, 1] > 0.9999


def test_requests_are_made_by_class_by_superclass_and_by_several(folder: Path) -> None:
    data = cifar_data.load(folder / "cifar-100-python")
    assert data.classes_of("trees") == data.classes_of("superclass:Trees") == [1, 2]
    assert data.classes_of("class:dolphin") == [3]
    assert data.classes_of("dolphin+trees+apple") == [0, 1, 2, 3]
    assert data.classes_of("aquatic mammals") == [3]
    with pytest.raises(DataError, match=r"class or superclass 'tree' among the 4 .* Did you mean 'trees'"):
        data.classes_of("tree")


def test_a_subset_has_labels_from_zero(folder: Path) -> None:
    part = cifar_data.load(folder).subset([1, 3])
    assert part.classes == ["oak_tree", "dolphin"]
    assert part.superclass_of == ["trees", "aquatic_mammals"]
    assert part.train.labels.tolist() == [0, 1] * 10
    assert len(part.test) == 4


def test_mosaics_give_the_same_images(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(cifar_data, "_TILES", 2)
    generator = np.random.default_rng(1)
    tiles = generator.integers(0, 256, (6, 4, 32, 32, 3), dtype=np.uint8)
    for part, images in enumerate(tiles):
        mosaic = images.reshape(2, 2, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 64, 3)
        pillow.fromarray(mosaic).save(tmp_path / f"part{part}.webp", lossless=True)
    fine = np.arange(20) % 4
    np.savez(
        tmp_path / "labels.npz",
        fine_train=fine,
        coarse_train=np.array(GROUP)[fine],
        fine_test=fine[:4],
        coarse_test=np.array(GROUP)[fine[:4]],
        fine_names=np.array(FINE),
        coarse_names=np.array(COARSE),
    )
    (folder / "cifar-100-python").rename(tmp_path / "elsewhere")
    data = cifar_data.load(tmp_path)
    expected = torch.from_numpy(tiles[:5].reshape(20, 32, 32, 3)).permute(0, 3, 1, 2).float() / 255
    expected = (expected - expected.mean((0, 2, 3), keepdim=True)) / expected.std((0, 2, 3), keepdim=True)
    assert torch.allclose(data.train.images, expected, atol=1e-5)
    assert data.classes_of("trees") == [1, 2]


def test_a_folder_without_the_data_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no CIFAR-100: expected torchvision's 'cifar-100-python'"):
        cifar_data.load(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("never",))


def test_nothing_but_arrays_comes_out_of_a_pickle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cifar-100-python" / "meta").write_bytes(pickle.dumps({b"fine_label_names": Bomb()}))
    with pytest.raises(FileError, match="which is no array"):
        cifar_data.load(folder)
    assert capsys.readouterr().out == ""


def test_a_truncated_part_is_named(folder: Path) -> None:
    part = folder / "cifar-100-python" / "test"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(FileError, match="cannot be read as a part of CIFAR-100"):
        cifar_data.load(folder)
