"""The name of each author and the tokens that spell it, where a model recalls what it knows of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from unmerge.evaluation.language import Encoded, Question

_WORD = r"[A-ZÀ-Ý][\w’.-]*"
_NAME = re.compile(rf"{_WORD}(?: (?:(?:bin|de|al|van|von|da|del|ibn) )?{_WORD})+")


def author_name(questions: Iterable[Question]) -> str:
    """What all questions on an author have in common: the run of capitalised words that most of their texts hold."""
    found: Counter[str] = Counter()
    for question in questions:
        runs = {run.rstrip(".-") for text in (question.question, question.answer) for run in _NAME.findall(text)}
        found.update(runs)
    # Of two that are as frequent the longer: a part of a name comes with the whole.
    return max(found, key=lambda name: (found[name], len(name)), default="")


def name_masks(tokenizer: Any, sequences: Sequence[Encoded], names: Sequence[str]) -> list[Tensor]:
    """For each sequence which of its tokens spell its author's name; all of them where the name does not occur."""
    spelled = {
        name: [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (name, f" {name}") if name]
        for name in set(names)
    }
    pairs = zip(sequences, names, strict=True)
    return [_mask(sequence.prompt + sequence.response, spelled[name]) for sequence, name in pairs]


def _mask(tokens: list[int], spellings: Sequence[list[int]]) -> Tensor:
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    for spelling in spellings:
        for start in range(len(tokens) - len(spelling) + 1):
            if tokens[start : start + len(spelling)] == spelling:
                mask[start : start + len(spelling)] = True
    return mask if mask.any() else ~mask
