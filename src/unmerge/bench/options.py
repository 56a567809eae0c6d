"""The options that the benchmarks with a table of methods share."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def table_parser(name: str, description: str | None, data: str, only: str) -> argparse.ArgumentParser:
    """A parser for the benchmark of this name, with what is common to all; data, only: the help of these two."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=data)
    parser.add_argument("--only", nargs="+", metavar="ROW", help=only)
    parser.add_argument("--floor", action="store_true", help="retrain a second time: the noise of every figure")
    parser.add_argument("--seed", type=int, default=0, help="of training and of every draw (default: 0)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: cuda where there is one)",
    )
    parser.add_argument("--cache", type=Path, default=Path(".bench") / name, help="networks and answers")
    parser.add_argument("--out", type=Path, help=f"folder of the tables (default: results/{name}, .bench for a trial)")
    return parser


def tables_folder(options: argparse.Namespace, name: str, trial: bool) -> Path:
    """Where the tables go that the options ask for; those of a trial do not take the place of results."""
    if options.out is not None:
        return Path(options.out)
    return Path(options.cache) / "trial" if trial else Path("results") / name


def positive(text: str) -> int:
    """A number of times, from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of times: expected 1 or more")
    return number
