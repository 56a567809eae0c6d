"""`unmerge bench`: the benchmarks that come with the package."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from unmerge import bench as package
from unmerge.cli.command import add
from unmerge.cli.console import Output
from unmerge.errors import suggest

EXAMPLES = [
    "unmerge bench   # lists the benchmarks",
    "unmerge bench engine --images 2000",
    "unmerge bench engine --help",
]


def bench(
    output: Output,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The benchmark; none lists them.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="All that stands behind its name, --help too, is its own."),
    ] = None,
) -> None:
    """Run a benchmark of the package, as python -m unmerge.bench.NAME does."""
    known = _benchmarks()
    if name is None:
        width = max(map(len, known))
        output.show("\n".join(f"{key:{width}}  {value}" for key, value in known.items()))
        output.result({"benchmarks": known})
        return
    if name not in known:
        raise typer.BadParameter(f"there is no benchmark {name!r}. {suggest(name, known)}")
    module = importlib.import_module(f"unmerge.bench.{name}")
    before, given = sys.argv, list(arguments or [])
    if given[:1] == ["--"]:
        del given[0]
    sys.argv = [f"unmerge bench {name}", *given]
    try:
        module.main()
    finally:
        sys.argv = before


def _benchmarks() -> dict[str, str]:
    """The modules that have a main function, with their first line; they are read, not run."""
    found = {}
    for entry in pkgutil.iter_modules(package.__path__):
        spec = importlib.util.find_spec(f"unmerge.bench.{entry.name}")
        if spec is None or spec.origin is None:
            continue
        tree = ast.parse(Path(spec.origin).read_text())
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body):
            found[entry.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def register(app: typer.Typer) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
    add(app, "bench", bench, EXAMPLES, context_settings=settings)
