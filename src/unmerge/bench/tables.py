"""Puts the tables of results/ into README.md and docs/: no figure there is typed by hand.

    python -m unmerge.bench.tables            # rewrites the blocks
    python -m unmerge.bench.tables --check    # fails where a block differs from its results

A block stands between `<!-- results:NAME -->` and `<!-- /results -->`. NAME is a file of results/ without its suffix:
the summary table of an evaluation (digits, cifar100/trees-zero-0), or "NAME:TABLE" for another of its tables.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from unmerge.errors import FileError
from unmerge.evaluation import Evaluation

_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where something would change")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder with README.md, docs/ and results/")
    options = parser.parse_args()
    stale = []
    for page in [options.root / "README.md", *sorted((options.root / "docs").glob("*.md"))]:
        text = page.read_text()
        filled = rendered(text, options.root / "results")
        if filled != text:
            stale.append(str(page))
            if not options.check:
                page.write_text(filled)
    print("changed: " + ", ".join(stale) if stale else "every table is that of its results")
    if stale and options.check:
        sys.exit(1)


def rendered(text: str, results: Path) -> str:
    """The page with every block filled from its results."""
    return _BLOCK.sub(lambda block: block[1] + table(block[2], results) + block[3], text)


def table(name: str, results: Path) -> str:
    """One table of an evaluation as Markdown."""
    file, _, title = name.partition(":")
    path = results / f"{file}.json"
    if not path.is_file():
        raise FileError(f"a page shows results:{name}, but there is no {path}. Run the benchmark that writes it.")
    found = Evaluation.from_dict(json.loads(path.read_text()))
    only = replace(found, tables={title or "summary": found[title or "summary"]}, missing={})
    lines = only.to_markdown().strip().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    return "\n".join(lines[start:]) + "\n"


if __name__ == "__main__":
    main()
