"""Statistics of the shards of a dataset, each from a process of its own, merged into those of one pass over all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from unmerge.collecting.statistics import KIND, Statistics
from unmerge.errors import FileError, StatisticsError, listing
from unmerge.storage.files import read_header
from unmerge.storage.fingerprint import differences
from unmerge.storage.forms import check_fields


@dataclass(frozen=True)
class Shard:
    """Which share of which data some statistics are of, and what was kept of each class."""

    number: int  # from 1
    total: int
    data: str  # a checksum of all the data, with how they are prepared
    per_class: str = "means"

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def places(self, samples: int) -> range:
        """The samples of this shard: every `total`-th, so that data in order of class are spread over all shards."""
        if samples < self.total:
            raise StatisticsError(f"{samples} samples cannot be cut into {self.total} shards; use at most {samples}.")
        return range(self.number - 1, samples, self.total)


@dataclass(frozen=True)
class _File:
    path: Path
    shard: Shard
    weights: Mapping[str, str]
    layers: frozenset[str]


def save_shard(statistics: Statistics, shard: Shard, path: str | Path) -> None:
    """Write the statistics of a shard with its number, its total and the checksum of the data."""
    statistics.save(path, asdict(shard))


def shard_in(path: str | Path) -> Shard | None:
    """Which share of which data the statistics in a file are of, where it says so."""
    header = read_header(Path(path), KIND)
    is_said = isinstance(header, dict) and header.get("shard") is not None
    return _opened(Path(path)).shard if is_said else None


def merge(paths: Iterable[str | Path]) -> tuple[Statistics, Shard]:
    """The statistics of all the data from the files of its shards, each exactly once; and what they are of.

    Missing, duplicated and foreign shards are refused by name before a tensor is read; one file is in memory at a time.
    """
    files = [_opened(Path(path)) for path in paths]
    if not files:
        raise StatisticsError("there is no file to merge. Pass those that `unmerge collect --shard I/N` wrote.")
    _check_same_work(files)
    _check_complete(files)
    # By number, so that the result does not depend on the order in which the files are named.
    ordered = sorted(files, key=lambda file: file.shard.number)
    merged = reduce(lambda whole, part: whole + part, (Statistics.load(file.path) for file in ordered))
    first = ordered[0].shard
    return merged, Shard(1, 1, first.data, first.per_class)


def _opened(path: Path) -> _File:
    header = read_header(path, KIND)
    try:
        check_fields(header, {"weights": dict[str, str], "layers": dict[str, Any]})
        check_fields(header.get("shard"), {"number": int, "total": int, "data": str, "per_class": str}, "its shard")
        shard = Shard(**header["shard"])
        if not 1 <= shard.number <= shard.total:
            raise TypeError(f"it is shard {shard}")
        return _File(path, shard, header["weights"], frozenset(header["layers"]))
    except TypeError as error:
        raise FileError(
            f"{path} is no shard: it does not say which share of the data it is of. Write it with "
            "`unmerge collect --shard I/N --out FILE`."
        ) from error


def _check_same_work(files: list[_File]) -> None:
    """Refuse files that differ from most of the others in what was read, and say in what."""
    for what, described in _SAME.items():
        values = [described(file) for file in files]
        usual = Counter(values).most_common(1)[0][0]
        foreign = [file for file, value in zip(files, values, strict=True) if value != usual]
        if foreign:
            home = next(file for file, value in zip(files, values, strict=True) if value == usual)
            names = listing(f"{file.path} ({file.shard})" for file in foreign)
            detail = _detail(what, foreign[0], home)
            raise StatisticsError(
                f"{names}: {what} than {home.path} ({home.shard}){detail}. Leave out what is foreign."
            )


def _check_complete(files: list[_File]) -> None:
    """Refuse shards that are there twice or not at all."""
    by_number: dict[int, list[Path]] = {}
    for file in files:
        by_number.setdefault(file.shard.number, []).append(file.path)
    total = files[0].shard.total
    twice = [f"{listing(map(str, paths))} are all shard {n}/{total}" for n, paths in by_number.items() if paths[1:]]
    if twice:
        raise StatisticsError(f"{'; '.join(twice)}: their samples would be counted more than once. Pass each once.")
    count = total - len(by_number)
    if count:
        # Not all of them: a file may say that there are more than memory holds.
        absent = (f"{number}/{total}" for number in range(1, total + 1) if number not in by_number)
        first = list(itertools.islice(absent, 16))
        more = f" and {count - len(first)} more" if count > len(first) else ""
        raise StatisticsError(
            f"{count} of {total} shards are missing: {', '.join(first)}{more}. Write them with "
            f"`unmerge collect --shard {first[0]} --out FILE` and pass them too."
        )


def _detail(what: str, foreign: _File, home: _File) -> str:
    if what == _WEIGHTS:
        return f": {differences(foreign.weights, home.weights)[0]!r} differs"
    if what == _LAYERS:
        return f": {listing(sorted(foreign.layers ^ home.layers))} stand on one side only"
    return ""


_WEIGHTS, _LAYERS = "collected with other weights", "collected from other layers"
_SAME: dict[str, Any] = {
    "of other data, or prepared otherwise,": lambda file: file.shard.data,
    "one of another number of shards": lambda file: file.shard.total,
    _WEIGHTS: lambda file: tuple(sorted(file.weights.items())),
    _LAYERS: lambda file: file.layers,
    "collected with another --per-class": lambda file: file.shard.per_class,
}
