"""Can a linear probe still read the forgotten classes from the frozen features?"""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.evaluation.bootstrap import paired_means, with_interval
from unmerge.evaluation.result import Better, Column, Row
from unmerge.evaluation.subject import NO_REFERENCE, Findings, NotMeasurable, Setting, Subject, needed_features

NEEDS_FEATURES = True
RIDGE = 1e-2
Hits = dict[str, Tensor]


def ridge_probe(features: Tensor, labels: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (width, classes), offsets and the class labels of a least-squares probe with equal class weights.

    Closed form, so that the same features always give the same probe. Every class counts alike: few retain
    samples a class stand beside many forget samples.
    """
    classes, place, counts = labels.unique(return_inverse=True, return_counts=True)
    share = (1 / (len(classes) * counts.double()))[place].to(features.device)
    targets = torch.nn.functional.one_hot(place, len(classes)).double().to(features.device)
    features = features.double()
    centre, level = share @ features, share @ targets
    centred = (features - centre) * share.sqrt()[:, None]
    wanted = (targets - level) * share.sqrt()[:, None]
    scale = ridge * centred.square().sum() / features.shape[1] + torch.finfo(torch.float64).tiny
    if len(features) > features.shape[1]:
        system = centred.mT @ centred
        system.diagonal().add_(scale)
        weights = torch.linalg.solve(system, centred.mT @ wanted)
    else:
        system = centred @ centred.mT
        system.diagonal().add_(scale)
        weights = centred.mT @ torch.linalg.solve(system, wanted)
    return weights, level - centre @ weights, classes


def probe_hits(
    forget: tuple[Tensor, Tensor], retain: tuple[Tensor, Tensor], ridge: float = RIDGE
) -> tuple[Tensor, Tensor]:
    """Whether a probe trained on half of forget and retain, class by class, is right on each other sample."""
    splits = (forget, retain)
    halves = [_halves(labels) for _, labels in splits]
    if any(len(held_out) == 0 for _, held_out in halves):
        raise NotMeasurable("it needs two samples of a class with features in forget and in retain")
    learned = [[part[rows] for part in split] for split, (rows, _) in zip(splits, halves, strict=True)]
    features, labels = (torch.cat(parts) for parts in zip(*learned, strict=True))
    weights, offsets, classes = ridge_probe(features, labels, ridge)
    forget_hits, retain_hits = (
        classes[(features[rows].double() @ weights + offsets).argmax(1).cpu()] == labels[rows]
        for (features, labels), (_, rows) in zip(splits, halves, strict=True)
    )
    return forget_hits, retain_hits


def _halves(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every second sample of each class to learn from, and the others."""
    rows = [(labels == label).nonzero().flatten() for label in labels.unique()]
    return torch.cat([own[::2] for own in rows]), torch.cat([own[1::2] for own in rows])


def observe(subject: Subject, setting: Setting, ridge: float = RIDGE) -> Hits:
    """The probe's answers on held-out forget and retain samples."""
    parts = [(features.to(subject.device), labels) for features, labels in needed_features(subject, "forget", "retain")]
    forget_hits, retain_hits = probe_hits(parts[0], parts[1], ridge)
    return {"forget": forget_hits, "retain": retain_hits}


def compare(own: Hits, retrained: Hits | None, setting: Setting) -> Findings:
    """The probe's accuracies, and the gap on forget to what it reads from the retrained features."""
    findings = Findings()
    row: Row = {}
    for place, (split, right) in enumerate(own.items()):
        other = right if retrained is None else retrained[split]
        drawn = paired_means(right, other, setting.draws, setting.seed, place)
        value = right.double().mean().item()
        better: Better | None = "higher" if split == "retain" else None if retrained is None else "near"
        row[Column(f"probe {split}", better, 2, True)] = with_interval(value, drawn[0], setting.level)
        if split == "forget" and retrained is not None:
            gap = value - other.double().mean().item()
            row[Column("gap", digits=2, percent=True)] = with_interval(gap, drawn[0] - drawn[1], setting.level)
    if retrained is None:
        findings.missing["gap"] = NO_REFERENCE
    findings.rows["decodability"] = row
    return findings
