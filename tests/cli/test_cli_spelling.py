"""Messages of the library, spelled as a person at a shell would type what they ask for."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import typer.main
from cli_place import SMALL, Command, Place

import unmerge as library
from unmerge.cli.application import app
from unmerge.cli.spelling import PHRASES, as_flags, flags_of


def flags(command: str) -> dict:
    return flags_of(typer.main.get_command(app).commands[command].params)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("or pass force=True.", "or pass --force."),
        ('use init="zero".', "use --init zero."),
        ("init='my file' is neither", "--init 'my file' is neither"),
        ("Pass alpha=..., for example 1.0.", "Pass --alpha A, for example 1.0."),
        ("alpha=-1.5 is not a finite number", "--alpha -1.5 is not a finite number"),
        ("recalibrate= is given, but", "--recalibrate is given, but"),
        ("with recalibrate=...", "with --recalibrate"),
    ],
)
def test_keywords_of_apply(said: str, typed: str) -> None:
    own = {**flags("run"), **flags("apply")}
    assert as_flags(said, own) == typed


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("layers=['a', 'b.c'] selects none", "--layers a,b.c selects none"),
        ("skip_layers=True is not", "--skip-layers True is not"),
        ("name the layers with Recipe(layers=...).", "name the layers with --layers VALUE."),
        ("or recipe.but(max_points=None) to use", "or --max-points none to use"),
        ("recalibrate=False", "--no-recalibrate"),
        ("on_verdict='raise' refuses", "--on-verdict raise refuses"),
        ("it is 0.2 at alpha=4, and", "it is 0.2 at alpha=4, and"),
        ("/data/alpha=1/x.npz and sample=3", "/data/alpha=1/x.npz and sample=3"),
        ("is not of the form label=3", "is not of the form label=3"),
    ],
)
def test_keywords_of_run(said: str, typed: str) -> None:
    assert as_flags(said, flags("run")) == typed


@cache
def literals() -> str:
    """All text in the library's code, formatted parts left out."""
    folder = Path(library.__file__).parent
    files = [file for file in folder.rglob("*.py") if file.name != "spelling.py"]
    found = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return "\n".join(node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str))


@pytest.mark.parametrize("phrase", [phrase for phrase in PHRASES if phrase != "it needs the test split"])
def test_each_phrase_is_still_said(phrase: str) -> None:
    assert phrase in literals()


def test_the_commands_speak_in_flags(here: Command, place: Place, small_run: object) -> None:
    other = here("apply", "small-run", "--model", "models:build", "--to", "other")
    assert other.err.strip().endswith("or pass --force.")
    data = ("--data", "train.npz", "--forget", "label=3")
    judged = here("evaluate", "--model", "models:build", "--edit", "small-run", *data)
    assert judged.err.strip().endswith("or pass --force of unmerge apply.")
    layer = here("run", *SMALL, *data, "--rank", "500", "--basis", "pca", "--out", "wide", "--no-report")
    assert "warning: --rank 500 is more than the data supports" in layer.err
    clash = here("run", *SMALL, *data, "--basis", "blend", "--solver", "budgeted", "--out", "clash")
    assert clash.code == 2
    assert "--basis blend is a closed form of its own: use --solver exact" in clash.err


def test_what_is_missing_of_an_evaluation_is_spelled_so_too(here: Command) -> None:
    model = "models:build@w.safetensors"
    command = ("evaluate", "--model", model, "--data", "train.npz", "--forget", "label=3", "--axes")
    assert "pass one as --reference" in here(*command, "accuracy").out
    assert "it needs --test" in here(*command, "membership").out
    assert "pass --init zero" in here(*command, "fidelity", "--reference", model).out
