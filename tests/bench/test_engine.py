"""The benchmark of the engine: whole requests beside their parts, and what is written of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from unmerge.bench import engine
from unmerge.bench.stopwatch import Stopwatch


def test_a_part_is_that_of_the_quickest_whole() -> None:
    times = Stopwatch(torch.device("cpu"))
    times.seconds = {"forward": [2.0], "request": [3.0, 1.0], "request: pass": [0.5, 0.75]}
    times.note("request", {"solve": 0.25})
    times.note("request", {"solve": 0.125})
    rows = times.table("times", {"request": "forward"}, "ratio").cells
    assert {step: row["seconds"].value for step, row in rows.items()} == {
        "forward": 2.0, "request": 1.0, "request: pass": 0.75, "request: solve": 0.125,
    }  # fmt: skip
    assert rows["request: solve"]["slowest"].value == 0.25
    assert rows["request"]["ratio"].value == 0.5
    assert "ratio" not in rows["forward"]


def test_what_is_timed_is_returned_and_counted_as_often_as_it_was_made() -> None:
    times = Stopwatch(torch.device("cpu"))
    assert times.made("step", lambda: 7, repeats=3) == 7
    assert len(times.seconds["step"]) == 3


def test_every_kind_of_request_is_timed_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"engine --model tiny --images 60 --forget 12 --batch 12 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", arguments.split())
    engine.main()
    found = json.loads((tmp_path / "tiny-cpu.json").read_text())
    rows = {step: row["seconds"]["value"] for step, row in found["tables"]["times"]["rows"].items()}
    for request in ("first request", "next request", "class request, blend", "class request, lda"):
        parts = [value for step, value in rows.items() if step.startswith(f"{request}: ")]
        assert len(parts) >= 3
        assert sum(parts) <= rows[request] + 1e-3, "phases are rounded"
    assert found["settings"]["versions"]["torch"] == torch.__version__
    assert found["tables"]["sizes"]["rows"]["float64 eigh / bases and solve, lda"]["sizes"]["value"] > 0
    assert "first request: passes" in capsys.readouterr().out
    assert "better" not in (tmp_path / "tiny-cpu.md").read_text(), "seconds have no legend"
