"""Questions and answers as tokens to judge a model on: the chat template's prompt, then the answer and its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmerge.errors import DataError
from unmerge.tokens import Tokens, chat, end_token
from unmerge.tokens import padded as padded_tokens


@dataclass(frozen=True)
class Encoded:
    """The tokens of a prompt and of the response that a model is trained or judged on."""

    prompt: list[int]
    response: list[int]  # ends with the end-of-sequence token

    @property
    def tokens(self) -> Tokens:
        """Both as one sequence, with a loss on the response."""
        has_loss = [False] * len(self.prompt) + [True] * len(self.response)
        return Tokens(self.prompt + self.response, has_loss, [False] * len(self))

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def encode(tokenizer: Any, pairs: Iterable[tuple[str, str]]) -> list[Encoded]:
    """Each question and answer as tokens, the answer cut into them by itself.

    So the prompt is the one that `generate` continues, whatever is answered, and an answer is scored as it stands.
    `unmerge.tokens.encode`, which makes the batches to collect from, lets the chat template write the whole
    conversation, trims an answer where the template does, and knows of plain texts, limits and subjects. Where the
    template neither trims nor joins tokens across the border the two agree.
    """
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
    texts = [chat(tokenizer, text) for text in different]
    known = dict(zip(different, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
    return [known[question] for question in questions]


def padded(sequences: Sequence[Encoded], pad: int = 0) -> dict[str, Tensor]:
    """A batch: input_ids, attention_mask and labels, the responses alone labelled; padding on the right."""
    return padded_tokens([sequence.tokens for sequence in sequences], pad)


def by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The places in batches of like length, the longest first, of at most `tokens` tokens with their padding."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
