"""Whatever a file holds: an unmerge error or a right result; no other exception, hang, gigabyte or write."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Verbosity, given, settings
from hypothesis import strategies as st
from reader_cases import CASES, PAGES, Case, write_all
from reliability_place import TIMES, bounded, tree

from unmerge.errors import UnmergeError, UnmergeWarning
from unmerge.storage.files import read_tensors, write_tensors

BY_NAME = {case.name: case for case in CASES}
SEALED = [case for case in CASES if case.kind is not None]
WRITTEN = [case for case in CASES if case.file.endswith((".json", ".yaml")) and case.name != "readable-edit"]
fuzzed = settings(
    max_examples=60 * TIMES,
    deadline=None,
    derandomize=TIMES == 1,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)

PATHS = ["../../victim", "/etc/passwd", "..", "", ".", "a\0b", "\udcff", "~/x", "C:\\x", "x" * 5000]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63) - 1, 10**400, 10**30, -1, 0]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([*PATHS, "(a+)+$", "(((((", "torch[1]:0", "float32[1]:0000000000000000", "os:system"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("readers")
    (root / "victim").write_text("untouched")
    target = root / "inner" / "place"
    target.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmergeWarning)
        write_all(target)
    return target


@contextmanager
def changed(path: Path) -> Iterator[bytes]:
    """The file as it is, to be changed in the block and back again."""
    before = path.read_bytes()
    try:
        yield before
    finally:
        path.write_bytes(before)


def survive(case: Case, place: Path) -> None:
    """Read as a caller does; the tree that the file lies in, and what is around it, stay as they are."""
    root = place.parents[1]
    before, said = tree(root), ""
    with warnings.catch_warnings(), bounded():
        warnings.simplefilter("ignore", UnmergeWarning)
        try:
            case.read(place)
        except UnmergeError as error:
            said = str(error)
    assert len(said) < 20_000
    assert tree(root) == before


def survive_value(case: Case, place: Path, path: list[int], value: Any) -> None:
    """Read a file in which one part is another value."""
    with changed(place / case.file) as raw:
        written = mutated(yaml.safe_load(raw), path, lambda _: value)
        (place / case.file).write_text(json.dumps(written))  # which is YAML too
        survive(case, place)


def mutated(value: Any, path: list[int], change: Callable[[Any], Any]) -> Any:
    """A copy of a JSON value in which one part, found by numbers, is changed."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return change(value)
    copied = copy.copy(value)
    key = list(copied)[path[0] % len(copied)] if isinstance(copied, dict) else path[0] % len(copied)
    if len(path) == 1 and path[0] % 7 == 0:
        del copied[key]
        return copied
    copied[key] = mutated(copied[key], path[1:], change)
    return copied


@pytest.mark.parametrize("case", [*CASES, PAGES[0]], ids=lambda case: case.name)
def test_what_is_good_is_read(case: Case, place: Path) -> None:
    with warnings.catch_warnings(), bounded():
        warnings.simplefilter("ignore", UnmergeWarning)
        case.read(place)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@given(draw=st.data())
@fuzzed
def test_damaged_bytes(case: Case, place: Path, draw: st.DataObject) -> None:
    with changed(place / case.file) as raw:
        at = draw.draw(st.integers(0, len(raw)))
        ways = {
            "truncated": raw[:at],
            "flipped": raw[:at] + bytes([raw[at % len(raw)] ^ (1 << at % 8)]) + raw[at + 1 :],
            "length": draw.draw(st.sampled_from([2**63 - 1, 2**64 - 1, 2**62, 10**8, len(raw), 0])).to_bytes(
                8, "little"
            )
            + raw[8:],
            "not UTF-8": raw[:at] + b"\xff\xfe\x80" + raw[at:],
            "longer": raw + raw[:at],
            "random": draw.draw(st.binary(max_size=200)),
            "empty": b"",
        }
        (place / case.file).write_bytes(ways[draw.draw(st.sampled_from(sorted(ways)))])
        survive(case, place)


@pytest.mark.parametrize("case", SEALED, ids=lambda case: case.name)
@given(path=st.lists(st.integers(0, 40), max_size=5), value=VALUES)
@fuzzed
def test_strange_headers_under_a_true_seal(case: Case, place: Path, path: list[int], value: Any) -> None:
    assert case.kind is not None
    with changed(place / case.file):
        tensors, header = read_tensors(place / case.file, case.kind)
        write_tensors(place / case.file, tensors, case.kind, mutated(header, path, lambda _: value))
        survive(case, place)


@pytest.mark.parametrize("case", SEALED, ids=lambda case: case.name)
@given(
    chosen=st.integers(0, 100),
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8]),
    way=st.sampled_from(["other", "absent", "infinite", "added"]),
)
@fuzzed
def test_strange_tensors_under_a_true_seal(
    case: Case, place: Path, chosen: int, shape: list[int], dtype: torch.dtype, way: str
) -> None:
    assert case.kind is not None
    with changed(place / case.file):
        tensors, header = read_tensors(place / case.file, case.kind)
        name = list(tensors)[chosen % len(tensors)]
        if way == "absent":
            del tensors[name]
        elif way == "infinite":
            tensors[name] = tensors[name] * float("nan") if tensors[name].is_floating_point() else -tensors[name]
        else:
            tensors[name if way == "other" else f"{name}+"] = torch.ones(shape, dtype=dtype)
        write_tensors(place / case.file, tensors, case.kind, header)
        survive(case, place)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
@given(path=st.lists(st.integers(0, 40), max_size=4), value=VALUES)
@fuzzed
def test_strange_values(case: Case, place: Path, path: list[int], value: Any) -> None:
    survive_value(case, place, path, value)


@pytest.mark.parametrize("case", PAGES, ids=lambda case: case.name)
@given(path=st.lists(st.integers(0, 40), max_size=4), value=VALUES)
@settings(fuzzed, max_examples=3 * TIMES)
def test_strange_values_of_a_run(case: Case, place: Path, path: list[int], value: Any) -> None:
    survive_value(case, place, path, value)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_nesting(case: Case, place: Path, depth: int) -> None:
    with changed(place / case.file):
        (place / case.file).write_text("[" * depth + "]" * depth)
        survive(case, place)
        (place / case.file).write_text('{"a":' * depth + "1" + "}" * depth)
        survive(case, place)


@pytest.mark.parametrize("case", SEALED, ids=lambda case: case.name)
def test_deep_nesting_under_a_true_seal(case: Case, place: Path) -> None:
    assert case.kind is not None
    with changed(place / case.file):
        tensors, header = read_tensors(place / case.file, case.kind)
        for field in header:
            write_tensors(place / case.file, tensors, case.kind, {**header, field: nested(400)})
            survive(case, place)


@pytest.mark.parametrize(
    "text",
    [
        "layers: &a [x, *a]",
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nlayers: [*e,*e,*e,*e,*e,*e,*e,*e,*e]",
        "rank: 2001-99-99",
        "rank: !!python/object/apply:os.system ['touch victim']",
        "rank: !!binary x",
        "rank: !!set {a, b}",
        "rank: " + "9" * 10_000,
        "rank: 0b",
        "rank: .inf",
        "alpha: 1e400",
        "? [a]\n: b",
        "<<: [a]",
        "layers: [1, 2]",
        "rank: 1:1:1:1",
        "\t- x",
        "--- a\n--- b",
        "!!float x: 3",
    ],
)
def test_what_yaml_allows(place: Path, text: str) -> None:
    with changed(place / "recipe.yaml"):
        (place / "recipe.yaml").write_text(text)
        survive(BY_NAME["recipe"], place)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", ".*.*.*.*.*.*b", "(", "[", "\\"])
def test_a_pattern_that_could_run_forever_is_refused(place: Path, pattern: str) -> None:
    with changed(place / "lora" / "adapter_config.json") as raw:
        config = {**json.loads(raw), "alpha_pattern": {pattern: 2}}
        (place / "lora" / "adapter_config.json").write_text(json.dumps(config))
        with bounded(), pytest.raises(UnmergeError, match="alpha_pattern"):
            BY_NAME["adapter-config"].read(place)


@pytest.mark.parametrize("file", [path for path in PATHS if path != "\udcff"])
@pytest.mark.parametrize("case", ["index", "initial-index"])
def test_an_index_that_leads_elsewhere(place: Path, case: str, file: str) -> None:
    path = place / BY_NAME[case].file
    with changed(path) as raw:
        found = json.loads(raw)
        found["weight_map"]["0.weight"] = file
        path.write_text(json.dumps(found))
        with bounded(), pytest.raises(UnmergeError):
            BY_NAME[case].read(place)
