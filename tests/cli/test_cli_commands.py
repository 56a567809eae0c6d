"""The command as a whole: help, demo, bench, report, and life without its extra."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from cli_place import COMMANDS, SOURCE, Command, Place, Result, environment

from unmerge import report
from unmerge.cli.application import app
from unmerge.cli.console import Common, Output
from unmerge.cli.records import write_report
from unmerge.report.extra import MissingExtra


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_worked_examples(here: Command, command: str) -> None:
    found = here(command, "--help")
    assert found.code == 0
    examples = found.out.partition("Examples")[2]
    assert f"unmerge {command}" in examples


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_can_be_typed(command: str) -> None:
    commands = typer.main.get_command(app).commands
    for example in import_module(f"unmerge.cli.{command.replace('-', '_')}").EXAMPLES:
        subprocess.run(["sh", "-n", "-c", example], check=True)
        program, name, *arguments = shlex.split(example, comments=True)
        assert program == "unmerge"
        commands[name].make_context(name, arguments)  # which refuses flags and values that it does not know


def test_help_lists_every_command_and_the_exit_codes(unmerge: Command) -> None:
    found = unmerge("--help")
    assert found.code == 0
    assert all(f" {command} " in found.out for command in COMMANDS)
    assert "Exit codes" in found.out
    assert found.err == ""


@pytest.mark.parametrize(
    ("arguments", "near"),
    [(("rn",), "'run'"), (("run", "--modle", "x"), "--model"), (("bench", "engin"), "'engine'")],
)
def test_a_typing_error_is_answered_with_the_near_name(here: Command, arguments: tuple[str, ...], near: str) -> None:
    found = here(*arguments)
    assert found.code == 2
    assert near in found.err


def test_demo_fast_prints_the_table_and_writes_a_report(unmerge: Command, here: Command, place: Place) -> None:
    found = unmerge("demo", "--fast", "--out", "demo", "--digit", "8")
    assert found.code == 0, found.err
    for row in ("retrained", "un-edited", "logit mask", "unmerge", "unmerge, no row removed"):
        assert f"\n{row} " in found.out
    assert "ToW" in found.out
    assert "feature gap" in found.out
    assert f"report: {Path('demo') / 'report.html'}" in found.out
    assert (place / "demo" / "report.html").is_file()
    assert "summary" in json.loads((place / "demo" / "evaluation.json").read_text())["tables"]
    command = next(line for line in found.out.splitlines() if line.startswith("next: unmerge "))
    arguments = command.removeprefix("next: unmerge ").replace("NEWDIR", "demo-new").split()
    assert here(*arguments).code == 0


def test_report_is_written_again(unmerge: Command, small_run: tuple[Path, Result]) -> None:
    out, _ = small_run
    (out / "report.html").unlink()
    found = unmerge("report", out)
    assert (found.code, found.out.strip()) == (0, str(out / "report.html"))
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("between", [[], ["--"]])
def test_bench_lists_and_runs(unmerge: Command, here: Command, between: list[str]) -> None:
    listed = here("bench", "--json").json["benchmarks"]
    assert {"engine", "recipe"} <= set(listed)
    assert "images" not in listed
    found = unmerge("bench", "engine", *between, "--help")
    assert found.code == 0
    assert "usage: unmerge bench engine" in found.out


def test_without_the_extra_it_says_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    around = environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE)])}
    code = "import sys, unmerge; assert 'typer' not in sys.modules; from unmerge.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env=around, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'unmerge[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_the_reports_packages_is_still_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object) -> None:
        raise MissingExtra("jinja2")

    monkeypatch.setattr(report, "write", absent)
    output = Output(Common())
    assert not write_report(tmp_path, output)
    assert "pip install 'unmerge[report]'" in capsys.readouterr().err
