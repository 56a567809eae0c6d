"""Expected calibration error: an argmax can survive while the probabilities do not."""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.evaluation.result import Column, Figure
from unmerge.evaluation.subject import Findings, NotMeasurable, Setting, Subject

BINS = 15
SPLITS = ("retain", "test")


def expected_calibration_error(logits: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Σ over bins of equal width of (share of samples) · |accuracy − mean confidence|."""
    confidence, guess = logits.double().softmax(1).max(1)
    right = (guess == labels).double()
    # Bins are open below and closed above, so that a confidence of 1 is in the last one.
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, place, right - confidence)
    return (gaps.abs().sum() / len(labels)).item()


def observe(subject: Subject, setting: Setting, bins: int = BINS) -> dict[str, float]:
    """The error on retain and test, whichever there are."""
    splits = subject.outputs.splits
    found = {
        split: expected_calibration_error(splits[split].logits, splits[split].labels, bins)
        for split in SPLITS
        if split in splits
    }
    if not found:
        raise NotMeasurable("it needs the retain or the test split")
    return found


def compare(own: dict[str, float], retrained: dict[str, float] | None, setting: Setting) -> Findings:
    """The errors side by side."""
    row = {Column(f"ECE {split}", "lower", digits=4): Figure(value) for split, value in own.items()}
    return Findings({"calibration": row})
