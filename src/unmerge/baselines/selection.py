"""Choosing among candidate weights by what training data show: retain accuracy times (1 - forget accuracy)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from unmerge.baselines.samples import Samples
from unmerge.baselines.training import predict
from unmerge.data.batches import Forward
from unmerge.model.evaluating import evaluating
from unmerge.placement.writing import write

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried, and the accuracies that they gave on training data."""

    settings: dict[str, float]
    forget_accuracy: float
    retain_accuracy: float

    @property
    def score(self) -> float:
        return self.retain_accuracy * (1 - self.forget_accuracy)


@dataclass(frozen=True)
class Judge:
    """What candidates are measured with."""

    samples: Samples
    batch_size: int = 128
    forward: Forward | None = None
    autocast: bool = False

    def accuracy(self, model: nn.Module, places: Tensor) -> float:
        """The share of some samples that the model labels right."""
        right = []
        with evaluating(model):
            for chosen in self.samples.batches(places, self.batch_size):
                batch, labels = self.samples.take(chosen)
                right.append((predict(model, batch, self.forward, self.autocast).argmax(1) == labels).sum())
        return torch.stack(right).sum().item() / len(places)

    def choose(
        self,
        model: nn.Module,
        candidates: Iterable[tuple[dict[str, float], Weights]],
        count: int,
        what: str,
        trace: list[Candidate] | None = None,
    ) -> nn.Module:
        """The model with the weights of the best candidate, the first of equals; `trace` is given all in order."""
        best: tuple[float, Weights] | None = None
        for settings, weights in tqdm(candidates, what, count, unit="candidate", disable=None, leave=False):
            write(model, weights)
            forget, retain = (self.accuracy(model, places) for places in (self.samples.forget, self.samples.retain))
            found = Candidate(settings, forget, retain)
            if trace is not None:
                trace.append(found)
            if best is None or found.score > best[0]:
                best = (found.score, weights)
        if best is not None:
            write(model, best[1])
        return model
