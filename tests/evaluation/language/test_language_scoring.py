"""One batched pass gives for each token what a pass over its sequence alone gives."""

from __future__ import annotations

import math

import pytest
import torch

from language import byte_tokenizer, questions, tiny_llama
from unmerge.errors import DataError
from unmerge.evaluation.language import encode, score

model = tiny_llama(double=True)
sequences = encode(byte_tokenizer(), [(entry.question, entry.answer) for entry in questions(5)])


def alone(sequence):
    """log p of the whole vocabulary at every response token, without a batch."""
    tokens = torch.tensor([[*sequence.prompt, *sequence.response]])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0]
    return torch.log_softmax(logits, -1)[len(sequence.prompt) - 1 : -1]


def test_every_token_has_the_scores_of_its_sequence_alone():
    found = score(model, sequences, batch_tokens=200)
    tables = [alone(sequence) for sequence in sequences]
    rows = [(table, token) for table, tokens in zip(tables, sequences, strict=True)
            for table, token in zip(table, tokens.response, strict=True)]  # fmt: skip
    assert found.lengths.tolist() == [len(sequence.response) for sequence in sequences]
    expected = torch.stack([table[token] for table, token in rows])
    torch.testing.assert_close(found.log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    assert found.hits.tolist() == [int(table.argmax()) == token for table, token in rows]
    for place, (table, _) in enumerate(rows):
        mean = sum(math.exp(value) * value for value in table.tolist())
        variance = sum(math.exp(value) * (value - mean) ** 2 for value in table.tolist())
        assert found.expected[place] == pytest.approx(mean, rel=1e-4)
        assert found.spread[place] == pytest.approx(math.sqrt(variance), rel=1e-3)


def test_the_loss_is_the_mean_over_the_response_with_its_end():
    found = score(model, sequences)
    for loss, probability, sequence in zip(found.losses, found.probabilities, sequences, strict=True):
        table = alone(sequence)
        mean = -sum(table[place, token].item() for place, token in enumerate(sequence.response)) / len(table)
        assert loss.item() == pytest.approx(mean, rel=1e-5)
        assert probability.item() == pytest.approx(math.exp(-mean), rel=1e-5)


def test_parts_are_the_scores_of_their_sequences():
    whole = score(model, sequences)
    first, rest = whole.split([2, 3])
    assert (len(first), len(rest)) == (2, 3)
    assert torch.equal(torch.cat([first.losses, rest.losses]), whole.losses)
    assert [len(part) for part in rest.answers(rest.hits)] == [len(entry.response) - 1 for entry in sequences[2:]]


def test_a_model_in_training_is_as_before():
    own = tiny_llama().train()
    score(own, sequences[:1])
    assert own.training
    assert all(parameter.grad is None for parameter in own.parameters())


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(DataError, match="no sequence"):
        score(model, [])
    with pytest.raises(DataError, match="Pass forward="):
        score(model, sequences, forward=lambda model, batch: None)
