"""Sources of data: arrays, folders, datasets on disk and loaders give the model the same numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_place import SMALL, WORDS, Command, Place, as_bytes
from PIL import Image

from unmerge.bench.digits import load_digits
from unmerge.cli.data import Arrays, Folder, OnDisk, source_of
from unmerge.cli.images import Preprocessing, preprocessing_of
from unmerge.cli.parts import Filtered, Part, pictures_of, some_of
from unmerge.errors import DataError, FileError


def test_bytes_are_images_and_numbers_are_left_alone(tmp_path: Path) -> None:
    images, _ = load_digits()
    pixels, labels = as_bytes(images.images), images.labels.numpy()
    prepare = Preprocessing(mean=(0.5,), std=(0.25,), channels=1)
    expected = (torch.from_numpy(pixels[:5]).float() / 255 - 0.5) / 0.25
    for name, array in (("flat", pixels), ("last", pixels[..., None]), ("first", pixels[:, None])):
        np.savez(tmp_path / f"{name}.npz", images=array, labels=labels)
        found = Arrays(tmp_path / f"{name}.npz", prepare).inputs(range(5))
        assert torch.equal(found, expected.unsqueeze(1))
    np.savez(tmp_path / "numbers.npz", x=images.images.numpy().astype(np.float64))
    numbers = Arrays(tmp_path / "numbers.npz", prepare)
    assert torch.equal(numbers.inputs([0, 3]), images.images[[0, 3]])
    assert numbers.labels is None


def test_a_grey_image_is_given_to_a_model_of_three_channels(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", images=np.full((2, 8, 8), 51, np.uint8), labels=np.arange(2))
    found = Arrays(tmp_path / "grey.npz", Preprocessing(size=(4, 6))).inputs([0, 1])
    assert found.shape == (2, 3, 4, 6)
    assert torch.allclose(found, torch.tensor(0.2))


def test_a_folder_gives_what_its_arrays_give(place: Place, tmp_path: Path) -> None:
    processing = preprocessing_of(None, place / "resnet", None, (), ())
    words = dict(enumerate(WORDS))
    folder = Folder(place / "images", processing, words, workers=2)
    assert len(folder) == 600
    pictures = [folder.picture(number) for number in (0, 100, 599)]
    np.savez(tmp_path / "same.npz", images=np.stack([np.asarray(picture) for picture in pictures if picture]))
    assert torch.equal(folder.inputs([0, 100, 599]), Arrays(tmp_path / "same.npz", processing).inputs([0, 1, 2]))


def test_subfolders_are_classes_by_name_by_number_or_in_order(place: Place, tmp_path: Path) -> None:
    picture = next((place / "images" / "two").iterdir()).read_bytes()

    def labels(names: dict[int, str], *folders: str) -> list[int]:
        root = tmp_path / "-".join(folders)
        for folder in folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / "a.PNG").write_bytes(picture)
        found = Folder(root, Preprocessing(), names, workers=1).labels
        assert found is not None
        return found.tolist()

    assert labels({4: "cat", 2: "dog"}, "cat", "dog") == [4, 2]
    assert labels({}, "7", "12") == [12, 7]
    assert labels({}, "cat", "dog") == [0, 1]


def test_the_identity_follows_data_and_preparation(place: Place) -> None:
    path = place / "train.npz"
    one, same, other = (Arrays(path, Preprocessing(mean=mean)).identity for mean in ((), (), (0.5,)))
    assert one == same != other
    assert Arrays(place / "test.npz", Preprocessing()).identity != one


def test_a_part_mixes_classes_and_is_read_again(place: Place) -> None:
    source = Arrays(place / "train.npz", Preprocessing(channels=1))
    assert source.labels is not None
    places = source.labels.argsort().tolist()  # sorted by class
    part = Part(source, places, 100)
    first = next(iter(part))[1]
    assert len(set(first.tolist())) == 10
    assert torch.equal(first, next(iter(part))[1])
    assert sorted(part.places) == list(range(len(source)))
    assert len(part) == len(list(part)) == 14
    assert sum(len(labels) for _, labels in some_of(part, 130, part.samples)) == 130


def test_a_loader_is_filtered_by_label() -> None:
    images, _ = load_digits()
    loader = images.loader()
    forget, retain = Filtered(loader, [3, 5], True), Filtered(loader, [3, 5], False)
    counts = [sum(len(labels) for _, labels in part) for part in (forget, retain)]
    assert counts == [len(images.only(3, 5).labels), len(images.without(3, 5).labels)]
    assert sum(len(labels) for _, labels in some_of(retain, 50, counts[1])) == 50
    batch, pictures = pictures_of(forget, 7)
    assert len(batch[0]) == len(pictures) == 7
    assert pictures[0] is not None
    assert pictures[0].size == (8, 8)


def test_a_mapping_of_arrays_feeds_keyword_arguments(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "text.npz",
        input_ids=np.ones((4, 3), np.int64),
        attention_mask=np.ones((4, 3), np.int64),
        labels=np.arange(4),
    )
    batch = next(iter(Part(Arrays(tmp_path / "text.npz", Preprocessing()), range(4), 2)))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == (2, 3)


@pytest.fixture(scope="module")
def datasets() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library itself
        return pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def digits(datasets: Any) -> Any:
    """Digits as a dataset of pictures, the classes named by letters."""
    images, _ = load_digits()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcdefghij"))})
    rows = {"image": [Image.fromarray(each) for each in as_bytes(images.images)], "label": images.labels.tolist()}
    return datasets.Dataset.from_dict(rows, features=features)


def test_a_dataset_on_disk(datasets: Any, digits: Any, tmp_path: Path) -> None:
    digits.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": digits}).save_to_disk(str(tmp_path / "splits"))
    images, _ = load_digits()
    expected = torch.from_numpy(as_bytes(images.images)[[2, 5]]).unsqueeze(1).float() / 255
    found = [
        source_of(f"{tmp_path}/{name}", Preprocessing(channels=1), {}, workers=1) for name in ("one", "splits#train")
    ]
    for source in found:
        assert isinstance(source, OnDisk)
        assert len(source) == len(images.labels)
        assert source.labels is not None
        assert source.labels.tolist() == images.labels.tolist()
        assert source.names[3] == "d"
        assert torch.equal(source.inputs([2, 5]), expected)
        picture = source.picture(2)
        assert picture is not None
        assert picture.size == (8, 8)
    assert found[0].identity == OnDisk(tmp_path / "one", Preprocessing(channels=1), None).identity
    assert found[0].identity != OnDisk(tmp_path / "one", Preprocessing(channels=3), None).identity


def test_numbers_of_a_dataset_are_left_alone(datasets: Any, tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
    datasets.Dataset.from_dict({"x": rows.tolist(), "y": [3, 1, 4, 1]}).save_to_disk(str(tmp_path / "rows"))
    found = OnDisk(tmp_path / "rows", Preprocessing(), None)
    assert torch.equal(found.inputs([3, 0]), torch.from_numpy(rows[[3, 0]]))
    assert found.labels is not None
    assert found.labels.tolist() == [3, 1, 4, 1]
    assert found.names == {}


def test_a_dataset_says_what_it_lacks(datasets: Any, tmp_path: Path) -> None:
    def saved(name: str, **columns: list[Any]) -> Path:
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / name))
        return tmp_path / name

    with pytest.raises(DataError, match=r"has the columns text, label; expected one of image, img, images"):
        OnDisk(saved("text", text=["a"], label=[0]), Preprocessing(), None)
    with pytest.raises(DataError, match=r"the column label holds Value\('string'\); expected a ClassLabel"):
        OnDisk(saved("strings", x=[[1.0]], label=["cat"]), Preprocessing(), None)
    unlabelled = OnDisk(saved("fine", x=[[1.0]], fine_label=[0]), Preprocessing(), None)
    with pytest.raises(DataError, match=r"no labels.* Name them as one of labels, label, targets, y"):
        unlabelled.known_labels("fine")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [[1.0]]})}).save_to_disk(str(tmp_path / "splits"))
    for split in (None, "trian"):
        with pytest.raises(DataError, match=r"has the splits train. Name one: .*splits#train"):
            OnDisk(tmp_path / "splits", Preprocessing(), split)
    (tmp_path / "text" / "state.json").write_text("{")
    with pytest.raises(FileError, match="cannot be read as a dataset"):
        OnDisk(tmp_path / "text", Preprocessing(), None)


def test_a_class_of_a_dataset_is_forgotten(here: Command, place: Place, digits: Any) -> None:
    digits.save_to_disk(str(place / "dataset"))
    options = ("--data", "dataset", "--forget", "label=d", "--out", "of-dataset", "--no-report", "--json")
    found = here("run", *SMALL, *options)
    assert found.code == 0, found.err
    assert found.json["request"] == "class d of dataset"
    assert found.json["accuracy"]["before"]["forget"] > 0.95
    assert found.json["accuracy"]["after"]["forget"] == 0
