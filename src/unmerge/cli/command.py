"""Subcommands whose options stand in dataclasses, so that those that several share are written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer

from unmerge.cli.console import Common, Output, speaking
from unmerge.cli.examples import command_with
from unmerge.cli.processes import Function, of_first, shared
from unmerge.cli.spelling import Flag, flags_of


def add(
    app: typer.Typer, name: str, function: Function, examples: list[str], together: bool = False, **settings: Any
) -> None:
    """Make `function(output, ...)` a subcommand; its dataclass parameters become their fields, as flags.

    together: of several processes all do it, each with its share of the data; otherwise the first alone.
    """
    # A paragraph is one line, which the terminal wraps as wide as it is.
    text = "\n\n".join(part.replace("\n", " ") for part in (inspect.getdoc(function) or "").split("\n\n"))
    work = shared(function) if together else of_first(function)
    app.command(name, cls=command_with(examples), help=text, **settings)(_flattened(function, work))


def _flattened(function: Function, work: Function) -> Callable[..., None]:
    """The work of a function with flat parameters in place of its own."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    required: list[inspect.Parameter] = []
    optional: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Output:
            continue
        found = _fields(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
        for each in found:
            (required if each.default is inspect.Parameter.empty else optional).append(each)
    optional += _fields(Common)
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (context, *required, *optional)]

    def called(context: typer.Context, **values: Any) -> None:
        def take(group: type[Any]) -> Any:
            return group(**{entry.name: values.pop(entry.name) for entry in fields(group)})

        with speaking(take(Common), _flags(context)) as output:
            built = {name: take(group) for name, group in groups.items()}
            code = work(output, **built, **values)
        if code:
            raise typer.Exit(code)

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _flags(context: typer.Context) -> dict[str, Flag]:
    """The flags of the command, and for what it lacks those of apply, where an edit meets a model."""
    commands = getattr(context.parent and context.parent.command, "commands", {})
    others = flags_of(commands["apply"].params, "apply") if "apply" in commands else {}
    return {**others, **flags_of(context.command.params)}


def _fields(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if entry.default is MISSING else entry.default,
            annotation=hints[entry.name],
        )
        for entry in fields(group)
    ]
