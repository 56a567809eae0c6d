"""One teacher-forced pass: what a language model says of every token of some responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, device_of, feed, logits_of, on_device, progress
from unmerge.errors import DataError
from unmerge.evaluation.language.encoding import Encoded, by_length, padded
from unmerge.model.evaluating import evaluating
from unmerge.tokens import IGNORED

TOKENS = {"cuda": 16384, "cpu": 1024}  # a batch, with its padding


@dataclass(frozen=True)
class TokenScores:
    """What a model says of each response token, the sequences one after another."""

    lengths: Tensor  # tokens a sequence, the end-of-sequence token included
    log_probs: Tensor
    hits: Tensor  # whether the token is the likeliest
    expected: Tensor  # mean of log p over the vocabulary, weighted with p
    spread: Tensor  # and its standard deviation

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def losses(self) -> Tensor:
        """The mean loss of each sequence's tokens."""
        return -torch.stack([part.mean() for part in self._parts(self.log_probs)])

    @property
    def probabilities(self) -> Tensor:
        """exp(−mean loss) of each sequence: TOFU's answer probability."""
        return torch.exp(-self.losses)

    def answers(self, values: Tensor) -> Iterator[Tensor]:
        """The values of each sequence's tokens, its end-of-sequence token left out."""
        return (part[:-1] for part in self._parts(values))

    def split(self, counts: Sequence[int]) -> list[TokenScores]:
        """The scores of so many sequences each."""
        lengths = self.lengths.split(list(counts))
        sizes = [int(part.sum()) for part in lengths]
        columns = [column.split(sizes) for column in astuple(self)[1:]]
        return [TokenScores(*parts) for parts in zip(lengths, *columns, strict=True)]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TokenScores:
        """The scores that `tensors` gave; TypeError where they do not belong together."""
        found = cls(**tensors)
        lengths, *columns = astuple(found)
        if lengths.dtype != torch.int64 or lengths.dim() != 1 or bool((lengths < 1).any()):
            raise TypeError("the lengths are not those of sequences")
        total = int(lengths.sum())
        if any(column.shape != (total,) or column.is_complex() for column in columns):
            raise TypeError(f"there is not one number for each of {total} tokens")
        return found

    def tensors(self) -> dict[str, Tensor]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def _parts(self, values: Tensor) -> Iterator[Tensor]:
        return iter(values.double().split(self.lengths.tolist()))


@torch.no_grad()
def score(
    model: nn.Module,
    sequences: Sequence[Encoded],
    *,
    batch_tokens: int | None = None,
    autocast: bool = False,
    forward: Forward | None = None,
    what: str = "scoring",
) -> TokenScores:
    """The scores of every response token, in the order of the sequences; one forward pass.

    Sequences of like length share a batch. The model runs in its own precision, or in bfloat16 with autocast.
    """
    if not sequences:
        raise DataError(f"{what}: there is no sequence to score.")
    device = device_of(model)
    size = batch_tokens or TOKENS.get(device.type, TOKENS["cpu"])
    found: list[tuple[Tensor, ...]] = [()] * len(sequences)
    parts = by_length([len(sequence) for sequence in sequences], size)
    with evaluating(model), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        for places in progress(parts, what, len(parts)):
            chosen = [sequences[place] for place in places]
            columns = _token_scores(model, padded(chosen), forward)
            sizes = [len(sequence.response) for sequence in chosen]
            for place, *own in zip(places, *(column.split(sizes) for column in columns), strict=True):
                found[place] = tuple(own)
    lengths = torch.tensor([len(sequence.response) for sequence in sequences])
    # Moved to the host at the end: a copy for every batch would wait for the device.
    return TokenScores(lengths, *(torch.cat(column).cpu() for column in zip(*found, strict=True)))


def _token_scores(model: nn.Module, batch: dict[str, Any], forward: Forward | None) -> tuple[Tensor, ...]:
    """The columns of `TokenScores` for a batch."""
    labels = batch["labels"][:, 1:]
    rows, columns = (labels != IGNORED).nonzero(as_tuple=True)
    batch = on_device(model, batch)
    logits = logits_of(feed(model, batch, forward))
    if logits is None or logits.dim() != 3:
        raise DataError("the model returned no logits (samples, tokens, vocabulary). Pass forward=, which does.")
    # Only the positions whose next token is scored: the vocabulary is wide.
    log_probs = logits[rows.to(logits.device), columns.to(logits.device)].float().log_softmax(-1)
    tokens = labels[rows, columns].to(log_probs.device)
    weights = log_probs.exp()
    expected = (weights * log_probs).sum(-1)
    variance = (weights * log_probs.square()).sum(-1) - expected.square()
    own = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return own, log_probs.argmax(-1) == tokens, expected, variance.clamp_min(0).sqrt()
