"""Membership inference with nine signals: does an attacker take forgotten samples for members?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmerge.errors import DataError
from unmerge.evaluation import signals
from unmerge.evaluation.attacks import (
    Guesses,
    Mode,
    Pool,
    area_under_curve,
    rate_at_false_positives,
    svc_attack,
    threshold_attack,
)
from unmerge.evaluation.bootstrap import Draws, resampled_means, with_interval
from unmerge.evaluation.predictions import SplitOutputs
from unmerge.evaluation.result import Better, Column, Figure, Row
from unmerge.evaluation.subject import NO_REFERENCE, Findings, Setting, Subject, needed

MAX_SAMPLES = 4000
_THRESHOLDS = {"confidence": 1, "entropy": -1, "m-entropy": -1}  # with the sign that makes members large
_MACHINES = {"confidence": "confidence", "entropy": "entropy", "m-entropy": "svc m-entropy"} | {
    "correctness": "correctness",
    "softmax": "softmax",
}


@dataclass(frozen=True)
class Attacked:
    """The guesses of nine attackers, and a score for each forget sample and each unseen one of the same classes."""

    guesses: dict[str, Guesses]
    forget: dict[str, Tensor]
    unseen: dict[str, Tensor]
    same_classes: bool  # False where the test split lacks the forgotten classes


def attack(
    retain: SplitOutputs,
    test: SplitOutputs,
    forget: SplitOutputs,
    mode: Mode = "corrected",
    held_out: int | None = None,
    max_samples: int | None = MAX_SAMPLES,
    seed: int = 0,
) -> dict[str, Guesses]:
    """The guesses of the nine attackers; the score of each averages TPR on retain and TNR on forget.

    An attacker learns from retain samples (members) and test samples (non-members), and is tried on held-out
    retain samples (members) and on forget samples (non-members).

    held_out: how many retain samples to hold out; by default as many as forget has, at most half.
    mode, max_samples: as for `attack_sets`.
    """
    held = min(len(forget), len(retain) // 2) if held_out is None else held_out
    if not 0 < held < len(retain):
        raise DataError(f"held_out={held} of {len(retain)} retain samples: some must be held out and some left.")
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(part), generator=generator) for part in (retain, test, forget)]
    # In random order, so that the first so many of a set are a sample of it.
    sets = [(retain, orders[0][held:]), (test, orders[1]), (retain, orders[0][:held]), (forget, orders[2])]
    return attack_sets(*(_chosen(part, rows) for part, rows in sets), mode=mode, max_samples=max_samples)


def attack_sets(
    members: SplitOutputs,
    others: SplitOutputs,
    target_members: SplitOutputs,
    target_others: SplitOutputs,
    *,
    mode: Mode = "corrected",
    max_samples: int | None = MAX_SAMPLES,
) -> dict[str, Guesses]:
    """The guesses of the nine attackers on given sets: those they learn from, and those they are tried on.

    mode: "reference" repeats the public code with its three defects, to the number where `max_samples` is None.
    max_samples: the support vector machines learn from at most so many samples, members and non-members in
        their share, and are tried on at most so many of each kind. Thresholds see all.
    """
    if mode not in ("corrected", "reference"):
        raise DataError(f"mode={mode!r} is not 'corrected' or 'reference'.")
    sets = (members, others, target_members, target_others)
    readings = [readings_of(part.logits, part.labels, mode) for part in sets]
    labels = Pool(*(part.labels for part in sets))

    found: dict[str, Guesses] = {}
    for name, sign in _THRESHOLDS.items():
        values = Pool(*(sign * reading[name] for reading in readings))
        found[f"threshold {name}"] = threshold_attack(values, labels, mode)
    right = Pool(*(reading["correctness"] for reading in readings))
    found["threshold correctness"] = Guesses(right.target_members == 1, right.target_others == 0)
    sizes = _machine_sizes([len(part) for part in sets], max_samples)
    for name, reading_name in _MACHINES.items():
        parts = (reading[reading_name][:size] for reading, size in zip(readings, sizes, strict=True))
        found[f"SVC {name}"] = svc_attack(Pool(*parts))
    return found


def readings_of(logits: Tensor, labels: Tensor, mode: Mode = "corrected") -> dict[str, Tensor]:
    """What the attackers read from a set of answers; in single precision, as published, in reference mode."""
    public = mode == "reference"
    probabilities = (logits.float() if public else logits.double()).softmax(1)
    modified = signals.modified_entropy(probabilities, labels)
    return {
        "confidence": signals.confidence(probabilities, labels),
        "entropy": signals.entropy(probabilities),
        "m-entropy": modified,
        "svc m-entropy": signals.public_modified_entropy(probabilities, labels) if public else modified,
        "correctness": signals.correctness(probabilities, labels),
        "softmax": probabilities,
    }


def example_scores(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """How much each sample looks like a member: the log-odds of its label, −entropy and −modified entropy."""
    found = readings_of(logits, labels)
    return {
        "log-odds": signals.log_odds(logits, labels),
        "−entropy": -found["entropy"],
        "−m-entropy": -found["m-entropy"],
    }


def observe(
    subject: Subject,
    setting: Setting,
    mode: Mode = "corrected",
    held_out: int | None = None,
    max_samples: int | None = MAX_SAMPLES,
) -> Attacked:
    """The nine attacks and the scores of single samples."""
    retain, test, forget = needed(subject, "retain", "test", "forget")
    guesses = attack(retain, test, forget, mode, held_out, max_samples, setting.seed)
    # A class is hard or easy for members and non-members alike, so only samples of the same classes compare.
    alike = torch.isin(test.labels, forget.labels)
    unseen = alike if alike.any() else torch.ones_like(alike)
    return Attacked(
        guesses,
        example_scores(forget.logits, forget.labels),
        example_scores(test.logits[unseen], test.labels[unseen]),
        bool(alike.any()),
    )


def compare(own: Attacked, retrained: Attacked | None, setting: Setting) -> Findings:
    """Scores, signed and absolute gaps to the retrained model, TPR and TNR apart, and figures by sample."""
    near: Better | None = None if retrained is None else "near"
    other = own if retrained is None else retrained
    members, others = (_resampled(own, other, kind, setting) for kind in ("members", "others"))
    scores = (members + others) / 2  # (own and retrained, signals, draws)
    values = np.array([[guess.score for guess in side.guesses.values()] for side in (own, other)])

    findings = Findings(examples=own.forget)
    table: Row = {}
    rates: dict[str, Row] = {"true positives on retain": {}, "true negatives on forget": {}}
    for place, (name, guess) in enumerate(own.guesses.items()):
        table[Column(name, near)] = with_interval(values[0, place], scores[0, place], setting.level)
        for row, rate, draws in zip(
            rates.values(), (guess.true_positive_rate, guess.true_negative_rate), (members, others), strict=True
        ):
            row[Column(name, near)] = with_interval(rate, draws[0, place], setting.level)
    table[Column("mean", near)] = with_interval(values[0].mean(), scores[0].mean(0), setting.level)
    findings.rows["membership"] = table
    if retrained is None:
        findings.missing["gaps"] = NO_REFERENCE
    else:
        findings.rows["membership gaps"] = _gaps(list(own.guesses), values, scores, setting)
    findings.rows |= {f"membership, {title}": row for title, row in rates.items()}
    findings.rows["membership by sample"] = _by_sample(own, near)
    if not own.same_classes:
        findings.missing["unseen samples of the forgotten classes"] = (
            "the test split has none; forget samples are ranked against all of it"
        )
    return findings


def _chosen(part: SplitOutputs, rows: Tensor) -> SplitOutputs:
    return SplitOutputs(part.logits[rows], part.labels[rows], part.keys[rows])


def _machine_sizes(sizes: list[int], limit: int | None) -> list[int]:
    """How many of each set the support vector machines see."""
    if limit is None:
        return sizes
    share = min(1.0, limit / (sizes[0] + sizes[1]))
    return [max(1, round(share * size)) for size in sizes[:2]] + [limit] * 2


def _resampled(own: Attacked, other: Attacked, kind: str, setting: Setting) -> Draws:
    """Resampled rates of all attackers on members or non-members, as (own and retrained, signals, draws)."""
    hits = [getattr(guess, kind) for side in (own, other) for guess in side.guesses.values()]
    # The support vector machines may be tried on fewer samples, of which the others' are a continuation.
    found = np.empty((len(hits), setting.draws))
    for size in {len(hit) for hit in hits}:
        chosen = [place for place, hit in enumerate(hits) if len(hit) == size]
        found[chosen] = resampled_means(
            [hits[place] for place in chosen], setting.draws, setting.seed, kind == "others"
        )
    return found.reshape(2, len(own.guesses), setting.draws)


def _gaps(names: list[str], values: np.ndarray, scores: Draws, setting: Setting) -> Row:
    """Absolute gaps for each signal, their mean, and the signed gap of the mean score."""
    gaps, drawn = values[0] - values[1], scores[0] - scores[1]
    row = {
        Column(name, "lower"): with_interval(abs(gaps[place]), abs(drawn[place]), setting.level)
        for place, name in enumerate(names)
    }
    row[Column("mean |gap|", "lower")] = with_interval(abs(gaps).mean(), abs(drawn).mean(0), setting.level)
    row[Column("signed gap")] = with_interval(gaps.mean(), drawn.mean(0), setting.level)
    return row


def _by_sample(own: Attacked, near: Better | None) -> Row:
    row: Row = {}
    for name, scores in own.forget.items():
        unseen = own.unseen[name]
        row[Column(f"AUC {name}", near)] = Figure(area_under_curve(scores, unseen))
        row[Column(f"TPR at 1 % FPR {name}", near)] = Figure(rate_at_false_positives(scores, unseen))
    return row
