"""Samples and classes as a person names them: numbers in a file, labels by name or number."""

from __future__ import annotations

from pathlib import Path

from unmerge.errors import DataError, FileError, suggest


def read_places(path: Path, count: int) -> set[int]:
    """The numbers of samples in a file, one a line; what stands behind a # is no number."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no text: expected one number a line.") from error
    places = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) >= count:
            raise DataError(f"{path}, line {number}: {text!r} is not the number of a sample, from 0 to {count - 1}.")
        places.add(int(text))
    if not places:
        raise DataError(f"{path} names no sample: expected one number a line.")
    return places


def label_of(value: str, names: dict[int, str]) -> int:
    """The class that a name or a number stands for."""
    place = next((place for place, name in names.items() if name == value), None)
    if place is not None:
        return place
    try:
        return int(value)
    except ValueError:
        hint = suggest(value, names.values()) if names else "The classes have no names here: give their numbers."
        raise DataError(f"there is no class {value!r}. {hint}") from None


def span(labels: list[int]) -> str:
    """Labels in words: few as they are, many by the first and the last."""
    if len(labels) > 12:
        return f"{len(labels)} labels from {labels[0]} to {labels[-1]}"
    return ", ".join(map(str, labels))
