"""The subcommands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

from unmerge.cli import apply, bench, collect, demo, diagnose, evaluate, merge_stats, report, revert, run
from unmerge.version import VERSION

app = typer.Typer(
    name="unmerge",
    help="Make a fine-tuned network forget a class or a concept: a low-rank edit of its weights from forward passes.",
    epilog="\n\n".join(
        [
            "Exit codes: 0 done; 1 an error, said on stderr; 2 wrong usage; 3 the request was refused by its verdict "
            "(--on-verdict raise); 4 no strength reaches the target; 130 interrupted.",
            "First steps: unmerge demo --fast",
        ]
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    pass


for part in (demo, diagnose, run, collect, merge_stats, apply, revert, evaluate, report, bench):
    part.register(app)
