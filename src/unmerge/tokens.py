"""Batches of text for a language model, and masks that say which of their tokens count.

batches = tokens.encode(tokenizer, records)
unmerge.collect(model, batches, mask=tokens.answer)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmerge.errors import DataError

IGNORED = -100  # the label of a token without a loss
_NO_LIMIT = 10**6  # a tokenizer that knows of no longest input names a larger one
_NO_WORD = "\ue000\ue001"  # of private use
_EXAMPLE = "'Question: {question}\\nAnswer: {answer}'"


class Tokens(NamedTuple):
    """One record as a sequence of tokens."""

    ids: list[int]
    has_loss: list[bool]  # the answer's, or all of a plain text
    of_subject: list[bool]


def answer(batch: Mapping[str, Any]) -> Tensor:
    """A mask of the answers' tokens: those with a loss."""
    return _token_labels(batch) != IGNORED


def question(batch: Mapping[str, Any]) -> Tensor:
    """A mask of the tokens before the answers."""
    return batch["attention_mask"].bool() & (_token_labels(batch) == IGNORED)


def positions(attention_mask: Tensor) -> Tensor:
    """The position of each token in its own text, whichever side is padded."""
    return (attention_mask.long().cumsum(1) - 1).clamp_min(0)


def chat(tokenizer: Any, asked: str, reply: str | None = None, system: str | None = None) -> str:
    """The chat template's text of a question with its reply, or without one up to where it would begin."""
    messages = [{"role": "user", "content": asked}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if reply is not None:
        messages.append({"role": "assistant", "content": reply})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply is None))


def end_token(tokenizer: Any) -> int:
    """The end of sequence, with which answers end."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end of sequence, with which answers end. Set tokenizer.eos_token.")
    return int(tokenizer.eos_token_id)


def padded(parts: Sequence[Tokens], padding: int, side: str = "right") -> dict[str, Tensor]:
    """A batch {input_ids, attention_mask, labels}; padding and tokens without a loss have no label."""
    ids = _stacked([part.ids for part in parts], padding, side)
    mask = _stacked([[1] * len(part.ids) for part in parts], 0, side)
    has_loss = _stacked([part.has_loss for part in parts], False, side)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(has_loss, torch.tensor(IGNORED))}


def encode(
    tokenizer: Any,
    records: Iterable[Mapping[str, Any]],
    *,
    template: str | None = None,
    fields: tuple[str, str] = ("question", "answer"),
    text: str = "text",
    system: str | None = None,
    group: str | None = None,
    subject: str | None = None,
    max_length: int | None = None,
    truncate: str | None = None,
    batch_size: int = 16,
) -> list[dict[str, Tensor]]:
    """Batches {input_ids, attention_mask, position_ids, labels} of questions with answers, or of plain texts.

    A record with the entry `text` is one; another has the two `fields`, which go through the tokenizer's chat template
    (with the `system` message) or through `template`. Labels are those of the answer and the end of sequence after it.
    The whole text becomes tokens at once; in `evaluation.language.encode`, which says more of this, an answer does so
    by itself.

    template: plain text in place of the chat template, for example 'Question: {question}\\nAnswer: {answer}'.
    group: the entry with a whole number (an author, a document) that is the class label of all the record's tokens.
    subject: the entry with a name that occurs in the text; mask="subject" then counts the tokens of that name alone.
    max_length: by default the tokenizer's; longer records are an error, or lose their "start" or "end" by `truncate`.
    """
    _check(tokenizer, template, truncate, batch_size)
    limit = max_length or (tokenizer.model_max_length if tokenizer.model_max_length < _NO_LIMIT else None)
    encoded: list[Tokens] = []
    groups: list[int] = []
    for place, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise DataError(f"record {place} is a {type(record).__name__}; expected a mapping with {fields}.")
        is_plain = text in record
        if not is_plain:
            asked, replied = (_field(record, name, place) for name in fields)
            whole, start = _conversation(tokenizer, asked, replied, template, system, place)
        else:
            whole, start = _field(record, text, place), 0
        names = _spans(whole, _field(record, subject, place), place) if subject is not None else []
        is_chat = not is_plain and template is None  # a chat template writes its special tokens itself
        encoded.append(_fitting(_tokens(tokenizer, whole, start, names, not is_chat), limit, truncate, place))
        if group is not None:
            groups.append(_group(record, group, place))
    if not encoded:
        raise DataError("there is no record to encode.")
    parts = range(0, len(encoded), batch_size)
    batches = [_batch(tokenizer, encoded[part : part + batch_size], subject is not None) for part in parts]
    if group is not None:
        for part, batch in zip(parts, batches, strict=True):
            batch["group"] = torch.tensor(groups[part : part + batch_size])
    return batches


def _conversation(
    tokenizer: Any, asked: str, replied: str, template: str | None, system: str | None, place: int
) -> tuple[str, int]:
    """The whole text of a question with its answer, and where the answer begins."""
    if template is not None:
        before, after = template.split("{answer}")
        before = before.replace("{question}", asked)
        return before + replied + after, len(before)
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(f"the tokenizer has no chat template. Pass a plain one: template={_EXAMPLE}.")
    # Where a word stands that no template has; the answer itself may also be a part of the template's own words.
    whole = chat(tokenizer, asked, replied, system)
    start = chat(tokenizer, asked, _NO_WORD, system).find(_NO_WORD)
    if start < 0 or not whole[start:].startswith(replied.strip()):  # many templates strip what they are given
        raise DataError(f"record {place}: the chat template changes the answer {replied!r}. Pass template={_EXAMPLE}.")
    return whole, start


def _tokens(tokenizer: Any, whole: str, start: int, names: list[tuple[int, int]], with_special: bool) -> Tokens:
    found = tokenizer(whole, add_special_tokens=with_special, return_offsets_mapping=True, truncation=False)
    ids, offsets = list(found["input_ids"]), found["offset_mapping"]
    # A token that begins with the space before the answer is one of the answer.
    has_loss = [end > start for _, end in offsets]
    of_subject = [any(first < high and end > low for low, high in names) for first, end in offsets]
    if ids and ids[-1] == tokenizer.eos_token_id:
        has_loss[-1] = True
    ends = [place for place, token in enumerate(ids) if token == tokenizer.eos_token_id and has_loss[place]]
    if not ends:
        return Tokens([*ids, tokenizer.eos_token_id], [*has_loss, True], [*of_subject, False])
    kept = slice(ends[0] + 1)  # without what a chat template writes behind the end of the answer
    return Tokens(ids[kept], has_loss[kept], of_subject[kept])


def _fitting(tokens: Tokens, limit: int | None, truncate: str | None, place: int) -> Tokens:
    """The tokens, cut where they are too many and cutting was asked for."""
    if limit is None or len(tokens.ids) <= limit:
        return tokens
    if truncate is None:
        raise DataError(
            f"record {place} has {len(tokens.ids)} tokens, more than the {limit} that fit. Pass truncate='end' or "
            "'start', a larger max_length, or leave the record out."
        )
    kept = slice(None, limit) if truncate == "end" else slice(-limit, None)
    cut = Tokens(tokens.ids[kept], tokens.has_loss[kept], tokens.of_subject[kept])
    if not any(cut.has_loss):
        raise DataError(f"record {place}: nothing of its answer is left of {limit} tokens. Pass truncate='start'.")
    return cut


def _batch(tokenizer: Any, parts: list[Tokens], with_subject: bool) -> dict[str, Tensor]:
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    batch = padded(parts, padding, tokenizer.padding_side)
    batch["position_ids"] = positions(batch["attention_mask"])
    if with_subject:
        batch["subject"] = _stacked([part.of_subject for part in parts], False, tokenizer.padding_side)
    return batch


def _stacked(rows: Sequence[Sequence[int]], padding: int, side: str) -> Tensor:
    """Rows of different length as one tensor."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding, padding_side=side)


def _spans(whole: str, name: str, place: int) -> list[tuple[int, int]]:
    """Where a name occurs in a text."""
    found, start = [], whole.find(name)
    while start >= 0:
        found.append((start, start + len(name)))
        start = whole.find(name, start + len(name))
    if not found:
        raise DataError(f"record {place}: its subject {name!r} does not occur in its text {whole!r}.")
    return found


def _field(record: Mapping[str, Any], name: str, place: int) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        found = f"is {value!r}" if name in record else f"is missing; it has {list(record)}"
        raise DataError(f"record {place}: its entry {name!r} {found}. Expected text that is not empty.")
    return value


def _group(record: Mapping[str, Any], name: str, place: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"record {place}: its group {name!r} is {value!r}; expected a whole number.")
    return value


def _token_labels(batch: Mapping[str, Any]) -> Tensor:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        raise DataError(
            "the batch has no token labels (samples, positions) under 'labels', which say where answers are."
        )
    return labels


def _check(tokenizer: Any, template: str | None, truncate: str | None, batch_size: int) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{type(tokenizer).__name__} does not know where in the text its tokens stand. Pass a fast tokenizer: "
            "transformers.AutoTokenizer.from_pretrained(...) of a directory with a tokenizer.json."
        )
    end_token(tokenizer)
    if template is not None and (template.count("{answer}") != 1 or "{question}" not in template.split("{answer}")[0]):
        raise DataError(
            f"template={template!r} does not hold {{question}} and then one {{answer}}, as {_EXAMPLE} does."
        )
    if truncate not in (None, "start", "end"):
        raise DataError(f"truncate={truncate!r} is not None, 'start' or 'end'.")
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} is not a whole number from 1.")
