"""TOFU's questions on fictitious authors, from a folder with its .jsonl files: what is forgotten, kept and asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmerge.bench.tofu_names import author_name, name_masks
from unmerge.errors import DataError
from unmerge.evaluation.language import Encoded, Question, encode, padded, read_questions
from unmerge.evaluation.language.encoding import by_length, encode_prompts

RETAINED = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
AUTHOR = 20  # consecutive questions are on one author
ASKED = ("forget", "retain", "real_authors", "world_facts")  # the model also answers these in its own words
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Tofu:
    """The questions of a request; authors are numbered in the order of the whole data set."""

    forget: list[Question]
    retain: list[Question]
    forget_authors: list[int]
    retain_authors: list[int]
    splits: dict[str, list[Question]]  # what is asked: with paraphrased and wrong answers

    @property
    def holdout(self) -> list[Question]:
        """Questions on authors that no model is trained on."""
        return self.splits["holdout"]


def load(folder: Path, split: str = "forget10", limit: int | None = None) -> Tofu:
    """The request to forget a split; with a limit so many questions of each file, spread over its authors."""
    if split not in RETAINED:
        raise DataError(f"split={split!r} is not one of {', '.join(RETAINED)}.")
    if limit is not None and limit < 2:
        raise DataError(f"limit={limit} leaves too little to compare; expected at least 2 questions.")

    def read(name: str) -> list[Question]:
        return read_questions(folder / f"{name}.jsonl")

    forget, retain = read(split), read(RETAINED[split])
    authors = [place // AUTHOR for place in range(len(retain) + len(forget))]
    files = {
        "forget": f"{split}_perturbed",
        "retain": "retain_perturbed",
        "real_authors": "real_authors_perturbed",
        "world_facts": "world_facts_perturbed",
        "holdout": split.replace("forget", "holdout"),
    }
    return Tofu(
        spread(forget, limit),
        spread(retain, limit),
        spread(authors[len(retain) :], limit),
        spread(authors[: len(retain)], limit),
        {name: spread(read(file), limit) for name, file in files.items()},
    )


def spread(entries: Sequence[Entry], limit: int | None) -> list[Entry]:
    """At most `limit` entries at even distances."""
    if limit is None or limit >= len(entries):
        return list(entries)
    return [entries[place * len(entries) // limit] for place in range(limit)]


def encoded(tokenizer: Any, questions: Sequence[Question]) -> list[Encoded]:
    """Each question with its answer."""
    return encode(tokenizer, [(entry.question, entry.answer) for entry in questions])


def names_of(data: Tofu) -> dict[int, str]:
    """The name of each author."""
    questions: dict[int, list[Question]] = {}
    numbers = [*data.retain_authors, *data.forget_authors]
    for number, question in zip(numbers, [*data.retain, *data.forget], strict=True):
        questions.setdefault(number, []).append(question)
    return {number: author_name(own) for number, own in questions.items()}


def batches(
    tokenizer: Any, questions: Sequence[Question], authors: Sequence[int], names: Mapping[int, str], tokens: int
) -> list[dict[str, Tensor]]:
    """Batches of like length with the author of each sequence ("group") and two masks of its tokens.

    "content": question and answer, without what the chat template writes before them; "names": those that
    spell the author's name.
    """
    sequences = encoded(tokenizer, questions)
    spelled = name_masks(tokenizer, sequences, [names[author] for author in authors])
    # What the chat template writes before a question: as far as two that have nothing in common agree.
    one, other = encode_prompts(tokenizer, ["a", "?"])
    shared = next(place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    found = []
    for places in by_length([len(sequence) for sequence in sequences], tokens):
        batch = padded([sequences[place] for place in places])
        content = batch["attention_mask"].bool()
        content[:, :shared] = False
        batch["content"] = content
        batch["names"] = pad_sequence([spelled[place] for place in places], batch_first=True)
        batch["group"] = torch.tensor([authors[place] for place in places])
        found.append(batch)
    return found
