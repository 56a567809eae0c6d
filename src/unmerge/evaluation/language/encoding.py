"""Questions and answers as tokens: the tokenizer's chat template, then the answer and the end-of-sequence token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmerge.errors import DataError
from unmerge.tokens import IGNORED


@dataclass(frozen=True)
class Encoded:
    """The tokens of a prompt and of the response that a model is trained or judged on."""

    prompt: list[int]
    response: list[int]  # ends with the end-of-sequence token

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def encode(tokenizer: Any, pairs: Iterable[tuple[str, str]]) -> list[Encoded]:
    """Each question and answer as tokens."""
    pairs = list(pairs)
    empty = [question for question, answer in pairs if not answer.strip()]
    if empty:
        raise DataError(f"the answer to {empty[0]!r} is empty, so there is nothing to score.")
    prompts = encode_prompts(tokenizer, [question for question, _ in pairs])
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"] if pairs else []
    end = end_token(tokenizer)
    return [Encoded(prompt, [*answer, end]) for prompt, answer in zip(prompts, answers, strict=True)]


def encode_prompts(tokenizer: Any, questions: Sequence[str]) -> list[list[int]]:
    """Each question as the tokens after which the answer is expected."""
    if not questions:
        return []
    different = list(dict.fromkeys(questions))
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in different
    ]
    known = dict(zip(different, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
    return [known[question] for question in questions]


def end_token(tokenizer: Any) -> int:
    """The end-of-sequence token, which a tokenizer for this purpose must have."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token. Set tokenizer.eos_token.")
    return int(tokenizer.eos_token_id)


def padded(sequences: Sequence[Encoded], pad: int = 0) -> dict[str, Tensor]:
    """A batch: input_ids, attention_mask and labels, the responses alone labelled; padding on the right."""
    width = max(map(len, sequences))
    tokens = torch.full((len(sequences), width), pad)
    attention = torch.zeros_like(tokens)
    labels = torch.full_like(tokens, IGNORED)
    for row, sequence in enumerate(sequences):
        length = len(sequence)
        tokens[row, :length] = torch.tensor(sequence.prompt + sequence.response)
        attention[row, :length] = 1
        labels[row, len(sequence.prompt) : length] = tokens[row, len(sequence.prompt) : length]
    return {"input_ids": tokens, "attention_mask": attention, "labels": labels}


def by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The places in batches of like length, the longest first, of at most `tokens` tokens with their padding."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
