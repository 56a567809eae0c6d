"""A few samples to forget, with what the model says of them: pictures with classes, questions with answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unmerge import tokens
from unmerge.cli.images import png
from unmerge.cli.language import Texts
from unmerge.cli.parts import Part, pictures_of
from unmerge.cli.requests import Requested
from unmerge.data.batches import device_of, feed, labels_of, logits_of, on_device
from unmerge.measures import answer_probabilities
from unmerge.model.evaluating import evaluating

SAMPLES = 12
NEW_TOKENS = 48  # of an answer in the model's own words, at most

Said = list[tuple[str, float]]  # what the model says of each sample, and how sure it is


@dataclass(frozen=True)
class Few:
    """What a report shows of each sample, or None, and how the model is asked about them all."""

    faces: list[dict[str, Any] | None]
    ask: Callable[[], Said]

    def entries(self, before: Said, after: Said) -> list[dict[str, Any]]:
        """The samples as a report shows them, with what the model said before and after."""
        return [
            {
                **face,
                "before": was[0],
                "before_confidence": round(was[1], 4),
                "after": now[0],
                "after_confidence": round(now[1], 4),
            }
            for face, was, now in zip(self.faces, before, after, strict=True)
            if face is not None
        ]


def few_of(request: Requested, module: nn.Module) -> Few:
    """The first samples to forget; none of a loader of texts, which does not say how they read."""
    part = request.forget
    if isinstance(part, Part) and isinstance(part.source, Texts):
        return _texts(part.source, part.places[:SAMPLES], module)
    batch, pictures = pictures_of(part, SAMPLES)
    labels = labels_of(batch)
    if labels is None:
        return Few([], list)

    def name(label: int) -> str:
        return request.names.get(label, str(label))

    faces = [
        None if picture is None else {"png": png(picture), "label": name(int(label))}
        for label, picture in zip(labels, pictures, strict=True)
    ]
    return Few(faces, lambda: [(name(place), share) for place, share in _predicted(module, batch)])


@torch.no_grad()
def _predicted(module: nn.Module, batch: Any) -> list[tuple[int, float]]:
    """The likeliest class of each sample and its probability."""
    with evaluating(module):
        logits = logits_of(feed(module, on_device(module, batch)))
    assert logits is not None
    shares, places = logits.double().softmax(1).max(1)
    return list(zip(places.tolist(), shares.tolist(), strict=True))


def _texts(source: Texts, places: list[int], module: nn.Module) -> Few:
    records = [source.records[place] for place in places]
    faces: list[dict[str, Any] | None] = [
        {"text": record["text"], "label": ""}
        if "text" in record
        else {"text": record["question"], "label": record["answer"]}
        for record in records
    ]
    batch = source.inputs(places)
    return Few(faces, partial(_answered, module, source.tokenizer, batch, ["text" not in record for record in records]))


@torch.no_grad()
def _answered(module: nn.Module, tokenizer: Any, batch: dict[str, Tensor], asked: list[bool]) -> Said:
    """The greedy answer to each question, nothing for a plain text, and the probability of the right one."""
    said = [""] * len(asked)
    with evaluating(module):
        shares = answer_probabilities(module, batch).tolist()
        places = [place for place, is_question in enumerate(asked) if is_question]
        if places and hasattr(module, "generate"):
            for place, answer in zip(places, _generated(module, tokenizer, batch, places), strict=True):
                said[place] = answer
    return list(zip(said, shares, strict=True))


def _generated(module: Any, tokenizer: Any, batch: dict[str, Tensor], places: list[int]) -> list[str]:
    from transformers import GenerationConfig

    counted, asked = tokens.answer(batch), tokens.question(batch)
    end = tokenizer.eos_token_id
    prompts = []
    for place in places:
        before = asked[place] & (counted[place].cumsum(0) == 0)
        prompts.append(batch["input_ids"][place][before])
    width = max(map(len, prompts))
    # On the left, so that every answer begins at the same position.
    rows, seen = torch.full((len(places), width), end), torch.zeros(len(places), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        rows[row, width - len(prompt) :], seen[row, width - len(prompt) :] = prompt, 1
    longest = int(counted[places].sum(1).max())
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=min(NEW_TOKENS, longest), eos_token_id=end, pad_token_id=end
    )
    device = device_of(module)
    found = module.generate(rows.to(device), attention_mask=seen.to(device), generation_config=settings)
    return [text.strip() for text in tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)]
