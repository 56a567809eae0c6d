"""Accuracy per split and group, and ToW: the product of closeness to the retrained model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unmerge.errors import DataError, suggest
from unmerge.evaluation.bootstrap import paired_means, with_interval
from unmerge.evaluation.predictions import SplitOutputs
from unmerge.evaluation.result import Better, Column, Row
from unmerge.evaluation.subject import NO_REFERENCE, Findings, Setting, Subject

TUG_OF_WAR_SPLITS = ("forget", "retain", "test")
Hits = dict[str, dict[str, Tensor]]  # table, split or group


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest logit is that of the label, for each sample."""
    return logits.argmax(1) == labels


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of samples that are labelled right."""
    return hits(logits, labels).double().mean().item()


def tug_of_war(own: Mapping[str, Any], retrained: Mapping[str, Any]) -> Any:
    """ToW (eq. 6): the product over forget, retain and test of 1 − |Acc − Acc_RT|; numbers or arrays."""
    product: Any = 1.0
    for split in TUG_OF_WAR_SPLITS:
        product = product * (1 - abs(own[split] - retrained[split]))
    return product


def group_rows(part: SplitOutputs, choice: Any, group: str) -> Tensor:
    """The samples of a group: of some classes (a list), where a mask is true, or at an index (tensors)."""
    if not isinstance(choice, Tensor):
        return torch.isin(part.labels, torch.tensor(sorted(choice))).nonzero().flatten()
    if choice.dtype != torch.bool:
        return choice.cpu()
    if len(choice) != len(part):
        raise DataError(f"group {group!r} has a mask of {len(choice)} entries for a split of {len(part)} samples.")
    return choice.cpu().nonzero().flatten()


def observe(subject: Subject, setting: Setting) -> Hits:
    """Right or wrong for every sample of every split and group."""
    splits = subject.outputs.splits
    found: Hits = {"accuracy": {name: hits(part.logits, part.labels) for name, part in splits.items()}}
    groups: dict[str, Tensor] = {}
    for group, (split, choice) in setting.groups.items():
        if split not in splits:
            raise DataError(f"group {group!r} is of split {split!r}. {suggest(split, splits)}")
        rows = group_rows(splits[split], choice, group)
        if not len(rows):
            raise DataError(f"group {group!r} is empty: no sample of split {split!r} belongs to it.")
        groups[group] = found["accuracy"][split][rows]
    return found | ({"groups": groups} if groups else {})


def compare(own: Hits, retrained: Hits | None, setting: Setting) -> Findings:
    """The accuracies and ToW with their intervals; pairs of answers to one sample are resampled together."""
    findings = Findings()
    draws: dict[str, tuple[Any, Any]] = {}
    for title, parts in own.items():
        row: Row = {}
        for place, (name, right) in enumerate(parts.items()):
            other = None if retrained is None else retrained.get(title, {}).get(name)
            sampled = paired_means(right, right if other is None else other, setting.draws, setting.seed, place)
            better: Better | None = None if name == "forget" or title == "groups" else "higher"
            better = better if other is None else "near"
            column = Column(name, better, digits=2, percent=True)
            row[column] = with_interval(right.double().mean().item(), sampled[0], setting.level)
            if title == "accuracy" and other is not None:
                draws[name] = (sampled[0], sampled[1])
        findings.rows[title] = row
    absent = [split for split in TUG_OF_WAR_SPLITS if split not in draws]
    if retrained is None:
        findings.missing["ToW"] = NO_REFERENCE
    elif absent:
        findings.missing["ToW"] = f"it needs the {' and the '.join(absent)} split"
    else:
        value = tug_of_war(_means(own), _means(retrained))
        sampled = tug_of_war(
            {split: pair[0] for split, pair in draws.items()}, {split: pair[1] for split, pair in draws.items()}
        )
        findings.rows["accuracy"][Column("ToW", "higher", digits=4)] = with_interval(value, sampled, setting.level)
    return findings


def _means(found: Hits) -> dict[str, float]:
    return {split: right.double().mean().item() for split, right in found["accuracy"].items()}
