"""A question becomes the chat template's prompt, its answer the labelled rest with the end-of-sequence token."""

from __future__ import annotations

import pytest
import torch

from language import byte_tokenizer
from tokenizers_at_hand import tokenizer
from unmerge import tokens
from unmerge.errors import DataError, FileError
from unmerge.evaluation.language import Question, encode, padded, read_questions
from unmerge.evaluation.language.encoding import by_length
from unmerge.tokens import IGNORED


def test_the_tokens_spell_the_chat_and_only_the_answer_is_labelled():
    coder = byte_tokenizer()
    (found,) = encode(coder, [("Who?", "Ann Ó.")])
    assert coder.decode(found.prompt) == "<|start|>user\nWho?<|end|><|start|>assistant\n"
    assert coder.decode(found.response) == "Ann Ó.<|end|>"


def test_padding_is_on_the_right_and_has_neither_attention_nor_label():
    coder = byte_tokenizer()
    long, short = encode(coder, [("Who is it?", "Ann and Bob"), ("Who?", "C")])
    batch = padded([short, long], pad=7)
    length = len(short)
    assert batch["input_ids"].shape == (2, len(long))
    assert batch["input_ids"][0].tolist() == [*short.prompt, *short.response, *[7] * (len(long) - length)]
    assert batch["attention_mask"][0].tolist() == [1] * length + [0] * (len(long) - length)
    assert batch["labels"][0].tolist() == [
        *[IGNORED] * len(short.prompt), *short.response, *[IGNORED] * (len(long) - length)
    ]  # fmt: skip


@pytest.mark.parametrize("make", [byte_tokenizer, tokenizer])
def test_batches_to_collect_from_hold_the_same_tokens(make):
    coder = make()
    pairs = [("Who is it?", "Ann and Bob."), ("Where was Jaime Vasquez born?", "In Chile")]
    (batch,) = tokens.encode(coder, [{"question": question, "answer": answer} for question, answer in pairs])
    expected = padded(encode(coder, pairs), pad=coder.pad_token_id)
    assert all(torch.equal(batch[entry], values) for entry, values in expected.items())


def test_an_answer_is_scored_as_it_stands_but_collected_as_the_template_trims_it():
    coder = tokenizer()
    (found,) = encode(coder, [("Who?", " Ann ")])
    (batch,) = tokens.encode(coder, [{"question": "Who?", "answer": " Ann "}])
    assert coder.decode(found.response) == " Ann </s>"
    assert coder.decode(batch["input_ids"][tokens.answer(batch)]) == "Ann</s>"


def test_batches_hold_like_lengths_and_no_more_tokens_than_allowed():
    lengths = [3, 9, 4, 4, 12, 1, 30]
    found = by_length(lengths, 16)
    assert sorted(place for batch in found for place in batch) == list(range(7))
    assert [[lengths[place] for place in batch] for batch in found] == [[30], [12], [9], [4, 4, 3, 1]]


def test_an_empty_answer_is_refused():
    with pytest.raises(DataError, match="the answer to 'Who\\?' is empty"):
        encode(byte_tokenizer(), [("Who?", " ")])


def test_questions_are_read_with_all_their_answers(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"question": "q", "answer": "a\u2028b"}\n'
        '{"question": "q", "answer": "a", "paraphrased_answer": "p", "perturbed_answer": ["x", "y"]}\n\n'
    )
    assert read_questions(path) == [Question("q", "a\u2028b"), Question("q", "a", "p", ("x", "y"))]


def test_a_file_that_holds_no_questions_says_what_it_expected(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n["q", "a"]\n')
    with pytest.raises(FileError, match=r"some.jsonl, line 2: expected a JSON object with 'question'"):
        read_questions(path)
    with pytest.raises(FileError, match=r"there is no file .*other.jsonl. The folder has some.jsonl"):
        read_questions(tmp_path / "other.jsonl")
