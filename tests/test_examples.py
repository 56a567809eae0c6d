"""The scripts in examples/ run and do what they say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def loaded(name: str) -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_forget_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    loaded("forget_a_class").main(epochs=8)
    printed = capsys.readouterr().out
    assert printed.startswith("separable")
    assert "Edit(blend, 2 layers" in printed
    unmerge, mask = (re.search(rf"^{name} .*", printed, re.MULTILINE) for name in ("unmerge", "logit mask"))
    assert unmerge is not None
    assert mask is not None
    assert float(unmerge.group().split()[-2].rstrip("*")) > 0.9  # ToW


def test_many_requests(capsys: pytest.CaptureFixture[str]) -> None:
    loaded("many_requests").main(epochs=8)
    lines = capsys.readouterr().out.splitlines()
    shares = [[float(value) for value in re.findall(r"\d\.\d\d", line)] for line in lines]
    forgotten, back, composed, after = shares
    assert forgotten[:2] == composed[:2] == [0.0, 0.0]
    assert back[0] > 0.9
    assert back[1] == 0.0
    assert min(forgotten[2], composed[2], *after) > 0.9


def test_transformers_vit(capsys: pytest.CaptureFixture[str]) -> None:
    loaded("transformers_vit").main(epochs=12)
    found = re.search(
        r"alpha ([\d.]+) \(forget ([\d.]+), retain ([\d.]+)\), decided by target", capsys.readouterr().out
    )
    assert found is not None
    assert float(found[2]) <= 0.01
    assert float(found[3]) > 0.8


def test_every_example_is_run_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
