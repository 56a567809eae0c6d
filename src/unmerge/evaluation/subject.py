"""What every axis is given: a model with its outputs, and the settings of the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, device_of
from unmerge.errors import UnmergeError
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.result import Row


@dataclass(frozen=True)
class Subject:
    """One row of the tables."""

    name: str
    outputs: Outputs
    module: nn.Module | None = None  # None where only outputs were given
    measured_on: torch.device | str | None = None  # where its features are compared; by default where the module is

    @property
    def device(self) -> torch.device:
        if self.measured_on is not None:
            return torch.device(self.measured_on)
        return torch.device("cpu") if self.module is None else device_of(self.module)


@dataclass(frozen=True)
class Setting:
    """What holds for all rows."""

    seed: int = 0
    draws: int = 1000
    level: float = 0.95
    splits: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    forward: Forward | None = None
    groups: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    init: Any = None


@dataclass
class Findings:
    """What an axis has to say of a model: rows by table title, and what it could not measure."""

    rows: dict[str, Row] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # figure, reason
    examples: dict[str, Tensor] = field(default_factory=dict)


class NotMeasurable(UnmergeError):
    """An axis lacks what it needs; the message says what."""


NO_REFERENCE = "there is no retrained model; pass one as reference"


def needed(subject: Subject, *splits: str) -> list[SplitOutputs]:
    """The outputs on these splits."""
    absent = [split for split in splits if split not in subject.outputs.splits]
    if absent:
        raise NotMeasurable(f"it needs the {' and the '.join(absent)} split")
    return [subject.outputs.splits[split] for split in splits]


def needed_features(subject: Subject, *splits: str) -> list[tuple[Tensor, Tensor]]:
    """Features and labels of the samples that keep them, in their drawn order."""
    found = []
    for split in needed(subject, *splits):
        if split.features is None or split.rows is None:
            raise NotMeasurable("the outputs hold no features; make them with keep_features above 0")
        found.append((split.features, split.labels[split.rows]))
    return found
