"""Flags that several subcommands share and that belong to no group of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unmerge.cli.work import Settings
from unmerge.errors import suggest

VERDICTS = ("warn", "raise", "ignore")

Init = Annotated[
    str,
    typer.Option(
        "--init",
        metavar="REF",
        help='The weights before fine-tuning: "zero" (trained from scratch, or whole classes), a checkpoint file or '
        "directory, or package.module:function.",
        rich_help_panel="Model",
    ),
]
Known = Annotated[
    Path | None,
    typer.Option(
        "--statistics",
        metavar="FILE",
        help="Statistics of all the data from an earlier run with this model: then only what is forgotten is read.",
        rich_help_panel="Data",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output directory that unmerge wrote.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]


@dataclass(frozen=True)
class RunOptions:
    """What a run does beyond its recipe."""

    on_verdict: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="What to do when samples that are no whole classes have nothing in common: warn, raise (exit code 3) "
            "or ignore.",
        ),
    ] = "warn"
    search_alpha: Annotated[
        bool,
        typer.Option(
            "--search-alpha",
            help="Search the smallest strength that reaches --target, also where the edit recommends one.",
        ),
    ] = False
    target: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Forget accuracy to reach (by default 0.01), or answer probability of a language model (by default "
            "that of --init); exit code 4 where no strength does.",
        ),
    ] = None
    max_drop: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="By how much retain accuracy (by default 0.02) or answer probability (0.1) may fall in the search.",
        ),
    ] = None
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate/--no-recalibrate",
            help="Re-estimate the BatchNorms behind the edit, if any, and refit the classifier.",
        ),
    ] = True
    any_init: Annotated[
        bool, typer.Option("--any-init", help="Also take an --init that looks like another pretraining.")
    ] = False
    edited_only: Annotated[
        bool, typer.Option("--edited-only", help="Read the edited layers only: faster, with a shorter profile.")
    ] = False
    curve_samples: Annotated[int, typer.Option(min=1, metavar="N", help="Samples of each part to measure on.")] = 1000

    def settings(self) -> Settings:
        if self.on_verdict not in VERDICTS:
            raise typer.BadParameter(f"--on-verdict {self.on_verdict!r}. {suggest(self.on_verdict, VERDICTS)}")
        for name, value, high in (("--target", self.target, 1.0), ("--max-drop", self.max_drop, 1.0)):
            if value is not None and (not 0 <= value <= high or (name == "--target" and value in (0, 1))):
                raise typer.BadParameter(f"{name} {value:g} is not a share, for example 0.01.")
        return Settings(
            self.on_verdict,
            self.search_alpha,
            self.target,
            self.max_drop,
            self.recalibrate,
            not self.any_init,
            self.edited_only,
            self.curve_samples,
        )
