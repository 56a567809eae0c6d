"""The recipe of a command: flags over a YAML file over the defaults; flags and help come from Recipe's own fields."""

from __future__ import annotations

from dataclasses import Field, asdict, dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from unmerge.editing.edit import Edit
from unmerge.errors import FileError, RecipeError, listing
from unmerge.recipe import Recipe
from unmerge.storage.files import replacing
from unmerge.storage.forms import fits, shown

_PLAIN = str | int | float | bool | list[str] | None  # what a field can be in a file
PANEL = "Recipe: flags over --recipe over these defaults"


@dataclass(frozen=True)
class RecipeFile:
    """The flag that names a file."""

    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", metavar="FILE", help="A YAML file of recipe fields.", rich_help_panel=PANEL),
    ] = None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option(entry: Field[Any]) -> tuple[str, Any, Any]:
    rule = entry.metadata["rule"]
    accepted = "names or re: patterns, separated by commas" if rule is None else str(rule)
    text = f"{entry.metadata['meaning']} ({accepted}). Default: {entry.default}."
    kind = "VALUE" if rule is None or rule.words else "N" if rule.number is int else "X"
    option = typer.Option(_flag(entry.name), metavar=kind, help=text.replace("[", r"\["), rich_help_panel=PANEL)
    return entry.name, Annotated[str | None, option], None


# One flag for each field, so that no field is described a second time.
RecipeFlags: Any = make_dataclass("RecipeFlags", [_option(entry) for entry in fields(Recipe)], frozen=True)


def recipe_of(flags: Any, path: Path | None) -> Recipe:
    """The recipe of the flags that were given over those of a file."""
    values = {} if path is None else read(path)
    try:
        recipe = Recipe(**values)
    except RecipeError as error:
        # As it stands in the file, where it is to be changed.
        raise FileError(f"{path}: {str(error).replace('=', ': ', 1)}") from error
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    if not given:
        return recipe
    try:
        return Recipe(**{**values, **{name: _parsed(name, value) for name, value in given.items()}})
    except RecipeError as error:
        raise typer.BadParameter(str(error)) from error


def read(path: Path) -> dict[str, Any]:
    """The fields that a YAML file sets."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    # PyYAML lets through what a date, a number or a set with a strange content raises.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OSError) as error:
        raise FileError(f"{path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise FileError(f"{path} holds a {type(found).__name__}; expected fields of a recipe, such as 'rank: 16'.")
    strange = [name for name, value in found.items() if not fits(value, _PLAIN)]
    if strange:
        raise FileError(
            f"{path}: {strange[0]} is {shown(found[strange[0]])}; expected a number, a word or a list of words."
        )
    return found


def write(path: Path, edit: Edit) -> None:
    """The recipe of an edit as YAML that --recipe reads: each field with its meaning and, left open, what it became."""
    chosen = dict(edit.provenance.get("choices", {}))
    if "layers" in chosen:
        chosen |= {"layers": listing(edit.layers, len(edit.layers)), "skip_layers": chosen["layers"]}
    lines = []
    for entry in fields(Recipe):
        found = edit.recipe.to_dict()[entry.name]
        value = yaml.safe_dump({entry.name: found}, default_flow_style=False, width=10_000).strip()
        comments = [entry.metadata["meaning"]]
        if found in (None, "auto") and entry.name in chosen:
            comments.append(f"here: {chosen[entry.name]}")
        lines.append("".join(f"# {comment}\n" for comment in comments) + f"{value}\n")
    with replacing(path) as part:
        part.write_text("\n".join(lines))


def names_in(text: str) -> list[str]:
    """Names that stand in a flag, separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _parsed(name: str, value: str) -> Any:
    """The text of a flag as the value that the field takes."""
    rule = next(entry.metadata["rule"] for entry in fields(Recipe) if entry.name == name)
    if rule is None:
        return None if value.lower() == "none" else names_in(value)
    if value in rule.words:
        return value
    if rule.optional and value.lower() == "none":
        return None
    if rule.number is None:
        return value
    try:
        return rule.number(value)
    except ValueError:
        return value  # which the recipe refuses, with what it accepts
