"""Plain values that were read from a file, checked for the form that the code relies on."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin


def check_fields(values: Any, forms: Mapping[str, Any], where: str = "the header") -> None:
    """Raise TypeError where a field is missing or is not of its form, such as int, str | None or dict[str, float]."""
    if not isinstance(values, dict):
        raise TypeError(f"{where} is {shown(values)}, not a table of fields")
    for name, form in forms.items():
        if name not in values:
            raise TypeError(f"{where} has no {name!r}")
        if not fits(values[name], form):
            raise TypeError(f"{name!r} in {where} is {shown(values[name])}")


def fits(value: Any, form: Any) -> bool:
    """Whether a value that JSON can hold is of a form; float is a finite number, and no bool is a number."""
    if form is Any:
        return True
    origin, inner = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) and fits(value[key], inner[1]) for key in value)
    if origin is list:
        return isinstance(value, list) and all(fits(entry, inner[0]) for entry in value)
    if form is float:
        largest = sys.float_info.max
        return isinstance(value, (int, float)) and not isinstance(value, bool) and -largest <= value <= largest
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form)


def shown(value: Any) -> str:
    """A value for a message: short however large, and finished however deep it is."""
    return reprlib.repr(value)
