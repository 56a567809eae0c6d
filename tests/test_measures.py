"""The mean answer probability of a language model, beside the same written out text by text."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from decoders import decoder, padded, sentences
from unmerge.errors import DataError
from unmerge.measures import accuracy, answer_probabilities, answer_probability
from unmerge.tokens import IGNORED


def batch_of(lengths: list[int], answers: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    """Random sentences whose last tokens have labels."""
    batch = padded(sentences(lengths), side)
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        places = batch["attention_mask"][row].nonzero().flatten()[length - answer :]
        labels[row, places] = batch["input_ids"][row, places]
    return batch | {"labels": labels}


@torch.no_grad()
def written_out(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """exp of the mean log probability of each text's labelled tokens, every text on its own."""
    found = []
    for row in range(len(batch["labels"])):
        kept = batch["attention_mask"][row].bool()
        ids, labels = batch["input_ids"][row][kept], batch["labels"][row][kept]
        logs = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(-1)
        own = [logs[place - 1, ids[place]].item() for place in range(1, len(ids)) if labels[place] != IGNORED]
        if own:
            found.append(math.exp(sum(own) / len(own)))
    return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_probability_is_that_of_each_text_on_its_own(side: str) -> None:
    model = decoder("llama")
    batches = [batch_of([6, 9, 4], [2, 5, 1], side), batch_of([5], [5], side)]
    expected = [value for batch in batches for value in written_out(model, batch)]
    assert answer_probability(model, batches) == pytest.approx(sum(expected) / 4, rel=1e-9)
    torch.testing.assert_close(answer_probabilities(model, batches[0]).tolist(), expected[:3])


def test_texts_without_a_label_do_not_count() -> None:
    model = decoder("gpt2")
    batch = batch_of([6, 9, 4], [2, 0, 1])
    expected = written_out(model, batch)
    assert len(expected) == 2
    assert answer_probability(model, [batch]) == pytest.approx(sum(expected) / 2, rel=1e-9)
    with pytest.raises(DataError, match="no token of the texts has a label"):
        answer_probability(model, [batch_of([6, 3], [0, 0])])


def test_the_model_is_left_in_its_mode_and_others_are_refused() -> None:
    model = decoder("llama").train()
    answer_probability(model, [batch_of([6], [2])])
    assert model.training
    with pytest.raises(DataError, match="no token labels"):
        answer_probability(model, [padded(sentences([3]))])
    with pytest.raises(DataError, match=r"no logits \(samples, tokens, vocabulary\)"):
        answer_probability(model, [batch_of([6], [2])], forward=lambda *_: torch.zeros(1, 3))


def test_the_accuracy_of_a_language_model_is_refused_with_what_it_has_instead() -> None:
    with pytest.raises(DataError, match=r"metric=.*unmerge\.measures\.answer_probability"):
        accuracy(decoder("llama"), [batch_of([6, 9], [2, 5])])
