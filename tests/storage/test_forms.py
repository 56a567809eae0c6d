"""Plain values from a file have the form that is asked for, or an error names the field."""

from __future__ import annotations

from typing import Any

import pytest

from unmerge.storage.forms import check_fields, fits, shown


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (3, int),
        (3, float),
        (2.5, float),
        (None, str | None),
        ("x", str | None),
        (True, bool),
        ({"a": 1}, dict[str, int]),
        ({}, dict[str, int]),
        ([1, 2], list[int]),
        ([{"a": None}], list[dict[str, Any]]),
        (object(), Any),
    ],
)
def test_what_fits(value: Any, form: Any) -> None:
    assert fits(value, form)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (True, int),
        (False, float),
        (float("nan"), float),
        (float("inf"), float),
        (10**400, float),
        (2.0, int),
        ("3", int),
        (3, str | None),
        ({"a": "x"}, dict[str, int]),
        ({1: 1}, dict[str, int]),
        ([1], dict[str, int]),
        ((1, 2), list[int]),
        ([1, "x"], list[int]),
        (1, bool),
    ],
)
def test_what_does_not(value: Any, form: Any) -> None:
    assert not fits(value, form)


def test_an_error_names_the_field() -> None:
    check_fields({"a": 1, "more": 2}, {"a": int})
    with pytest.raises(TypeError, match="it has no 'b'"):
        check_fields({"a": 1}, {"b": int}, "it")
    with pytest.raises(TypeError, match="'a' in the header is 'x'"):
        check_fields({"a": "x"}, {"a": int})
    with pytest.raises(TypeError, match=r"the header is \[\], not a table of fields"):
        check_fields([], {"a": int})


def test_a_value_is_shown_shortly_however_large_it_is() -> None:
    value: Any = "x" * 100_000
    for _ in range(60):
        value = [value, value]  # 2^60 words when written out
    assert len(shown(value)) < 1000
