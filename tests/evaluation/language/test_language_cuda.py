"""On a GPU a language model is scored, answers and forgets as on the CPU."""

from __future__ import annotations

import pytest
import torch

from language import byte_tokenizer, questions, tiny_llama
from unmerge.baselines.language import METHODS
from unmerge.evaluation.language import ask, encode, padded, score

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
tokenizer = byte_tokenizer()
sequences = encode(tokenizer, [(entry.question, entry.answer) for entry in questions(6)])


def test_scores_are_those_of_the_cpu():
    here, there = score(tiny_llama(), sequences), score(tiny_llama().cuda(), sequences)
    torch.testing.assert_close(there.losses, here.losses, rtol=1e-3, atol=1e-3)
    half = score(tiny_llama().cuda(), sequences, autocast=True)
    torch.testing.assert_close(half.losses, here.losses, rtol=0.03, atol=0.03)


def test_answers_come_from_a_half_precision_copy():
    model = tiny_llama().cuda()
    found = ask(model, tokenizer, {"forget": questions(5)}, ["forget"], new_tokens=4)
    assert len(found.generated["forget"]) == 5
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("name", METHODS)
def test_a_step_in_full_precision_is_that_of_the_cpu(name):
    options = {"epochs": 1, "lr": 1e-3, "warmup": 0.0, "autocast": False} | ({"layer": 1} if name == "rmu" else {})
    batches = [padded(sequences)], [padded(sequences[:1])]
    here = METHODS[name](tiny_llama(), *batches, **options)
    there = METHODS[name](tiny_llama().cuda(), *batches, **options)
    assert next(there.parameters()).is_cuda
    after = here.model.layers[0].mlp.up_proj.weight
    moved = (there.model.layers[0].mlp.up_proj.weight.cpu() - after).abs().median()
    assert moved < 1e-4  # of a step of 1e-3 an entry


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_the_default(name):
    options = {"layer": 1} if name == "rmu" else {}
    found = METHODS[name](tiny_llama().cuda(), [padded(sequences)], [padded(sequences)], epochs=2, **options)
    assert all(parameter.isfinite().all() for parameter in found.parameters())
