"""Greedy answers in large batches, and how much of the right answer they contain."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from unmerge.data.batches import device_of, progress
from unmerge.errors import DataError
from unmerge.evaluation.language.encoding import encode_prompts
from unmerge.model.evaluating import evaluating
from unmerge.tokens import end_token

NEW_TOKENS = 200
BATCH = {"cuda": 1024, "cpu": 32}


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    questions: Sequence[str],
    *,
    new_tokens: int = NEW_TOKENS,
    batch_size: int | None = None,
    half: bool | None = None,
) -> list[str]:
    """The model's greedy answer to each question.

    half: a bfloat16 copy of the model answers; by default on a GPU.
    """
    from transformers import GenerationConfig

    device = device_of(model)
    size = batch_size or BATCH.get(device.type, BATCH["cpu"])
    end = end_token(tokenizer)
    # What is left out here would be taken from the model's own configuration.
    greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    settings = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=end, pad_token_id=end, **greedy)
    if half if half is not None else device.type == "cuda":
        model = copy.deepcopy(model).to(torch.bfloat16)
    prompts = encode_prompts(tokenizer, questions)
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    answers = [""] * len(prompts)
    with evaluating(model):
        for start in progress(range(0, len(order), size), "generation", -(-len(order) // size)):
            places = order[start : start + size]
            width = max(len(prompts[place]) for place in places)
            # On the left, so that every answer begins at the same position.
            rows = [[end] * (width - len(prompts[place])) + prompts[place] for place in places]
            seen = [[0] * (width - len(prompts[place])) + [1] * len(prompts[place]) for place in places]
            tokens, attention = (torch.tensor(values, device=device) for values in (rows, seen))
            found = model.generate(input_ids=tokens, attention_mask=attention, generation_config=settings)
            texts = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
            for place, text in zip(places, texts, strict=True):
                answers[place] = text.strip()
    return answers


def rouge_recalls(answers: Sequence[str], generated: Sequence[str]) -> list[float]:
    """ROUGE-L recall with stemming: how much of each answer is in what was generated, in its order."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise DataError("ROUGE needs the package rouge-score: pip install 'unmerge[lm]'.") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return [scorer.score(right, own)["rougeL"].recall for right, own in zip(answers, generated, strict=True)]
