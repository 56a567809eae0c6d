"""The examples below a help page can be copied as they stand, in a terminal of eighty columns too."""

from __future__ import annotations

import subprocess
from importlib import import_module

import pytest
from cli_place import COMMANDS, Command

from unmerge.cli.examples import WIDTH, lines_of


def joined(lines: list[str]) -> str:
    """What a shell reads."""
    return "\n".join(lines).replace(" \\\n    ", "").strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_stands_on_lines_of_its_own(here: Command, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    _, _, shown = here(command, "--help").out.partition("\n Examples\n\n")
    blocks = [block.splitlines() for block in shown.rstrip("\n").split("\n\n")]
    assert max(len(line) for block in blocks for line in block) <= WIDTH
    typed = [joined([line for line in block if not line.startswith(" #")]) for block in blocks]
    examples = import_module(f"unmerge.cli.{command.replace('-', '_')}").EXAMPLES
    assert typed == [example.partition("   # ")[0] for example in examples]
    comments = [line.removeprefix(" # ") for block in blocks for line in block if line.startswith(" #")]
    assert comments == [comment for example in examples if (comment := example.partition("   # ")[2])]


def test_a_long_command_is_broken_before_a_flag() -> None:
    flags = [f"--flag-{place} value" for place in range(8)]
    first, *rest = lines_of(f"unmerge run {' '.join(flags)}   # why")
    assert first == " # why"
    assert rest[0].endswith(" \\")
    assert not rest[-1].endswith("\\")
    assert all(line.startswith("     --flag-") for line in rest[1:])
    assert all(len(line) <= WIDTH for line in rest)
    said = subprocess.run(["sh", "-c", "echo " + "\n".join(rest)], capture_output=True, text=True, check=True)
    assert said.stdout == f"unmerge run {' '.join(flags)}\n"


def test_a_short_command_stays_one_line() -> None:
    assert lines_of("unmerge demo --fast") == [" unmerge demo --fast"]
