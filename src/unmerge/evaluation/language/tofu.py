"""TOFU's figures as OpenUnlearning defines them: what is forgotten, what is kept, and what an attacker still sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmerge.evaluation.language import attacks
from unmerge.evaluation.language.answers import Answers, Splits
from unmerge.evaluation.language.generation import rouge_recalls
from unmerge.evaluation.language.memorization import exact_memorization, extraction_strength
from unmerge.evaluation.language.scoring import TokenScores

PREFIXES = {"forget": "forget", "retain": "retain", "real_authors": "ra", "world_facts": "wf"}
UTILITY = tuple(
    f"{prefix}_{figure}"
    for prefix, probability in (("retain", "Q_A_Prob"), ("ra", "Q_A_Prob_normalised"), ("wf", "Q_A_Prob_normalised"))
    for figure in (probability, "Q_A_ROUGE", "Truth_Ratio")
)
_TINY = 1e-10


@dataclass(frozen=True)
class Metric:
    """A figure and, where it is one of many, those it is made of: an entry a question."""

    value: float
    entries: list[dict[str, Any]] | None = None


def metrics(
    own: Answers, splits: Splits, retrained: Answers | None = None, base: Answers | None = None
) -> dict[str, Metric]:
    """Every figure that can be had, under OpenUnlearning's names.

    splits: the questions that were asked, or some of the splits: "forget", "retain", "real_authors", "world_facts" and
        "holdout" (authors that no model was trained on, for membership).
    retrained: the answers of the model that never saw forget: for forget_quality and privleak.
    base: those of the model before fine-tuning: for mia_reference.
    """
    found: dict[str, Metric] = {}
    known = own.scores.keys() & splits.keys()
    for split, prefix in PREFIXES.items():
        if split in known:
            found |= _split_metrics(own, split, prefix, splits)
    if all(name in found for name in UTILITY):
        found["model_utility"] = Metric(harmonic_mean([found[name].value for name in UTILITY]))
    if "forget" in known:
        scores = own.scores["forget"]["answer"]
        found["exact_memorization"] = _mean("score", exact_memorization(scores))
        found["extraction_strength"] = _mean("score", extraction_strength(scores))
    if retrained is not None and "forget_Truth_Ratio" in found:
        ratios = [_truth_ratios(answers, "forget", splits) for answers in (own, retrained)]
        found["forget_quality"] = Metric(forget_quality(*ratios))
    if {"forget", "holdout"} <= known:
        found |= _membership(own, splits, retrained, base)
    return found


def truth_ratios(right: Tensor, wrong: Tensor, counts: Sequence[int]) -> Tensor:
    """R of each question from the mean token losses of its right and of its `counts` wrong answers (all in one row)."""
    mean_wrong = torch.stack([part.mean() for part in wrong.split(list(counts))])
    return torch.exp(-mean_wrong) / (torch.exp(-right) + _TINY)


def forget_quality(own: Tensor, retrained: Tensor) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test of the truth ratios against the retrained model's."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(own.numpy(), retrained.numpy()).pvalue)


def harmonic_mean(values: Sequence[float]) -> float:
    """n / Σ 1/v, and 0 where one of the values is 0."""
    return 0.0 if min(values) <= 0 else len(values) / sum(1 / value for value in values)


def _split_metrics(own: Answers, split: str, prefix: str, splits: Splits) -> dict[str, Metric]:
    scores, questions = own.scores[split], splits[split]
    answer = scores["answer"]
    found = {f"{prefix}_Q_A_Prob": _probabilities(answer)}
    for kind, name in (("paraphrase", "PARA"), ("wrong", "PERT")):
        if kind in scores:
            found[f"{prefix}_Q_A_{name}_Prob"] = _probabilities(scores[kind])
    if split in own.generated:
        found[f"{prefix}_Q_A_ROUGE"] = _rouge(own, split, splits)
    if "wrong" in scores:
        ratios = _truth_ratios(own, split, splits)
        # What is forgotten should be as likely as what is wrong, everything else likelier.
        values = ratios.minimum(1 / (ratios + _TINY)) if split == "forget" else (1 - ratios).clamp_min(0)
        found[f"{prefix}_Truth_Ratio"] = Metric(float(values.mean()), [{"score": value} for value in ratios.tolist()])
    if "wrong" in scores and split in ("real_authors", "world_facts"):
        counts = [len(question.wrong) for question in questions]
        others = torch.stack([part.sum() for part in scores["wrong"].probabilities.split(counts)])
        share = answer.probabilities / (answer.probabilities + others + _TINY)
        found[f"{prefix}_Q_A_Prob_normalised"] = _mean("prob", share)
    return found


def _truth_ratios(answers: Answers, split: str, splits: Splits) -> Tensor:
    scores = answers.scores[split]
    right = scores.get("paraphrase", scores["answer"])
    return truth_ratios(right.losses, scores["wrong"].losses, [len(question.wrong) for question in splits[split]])


def _rouge(own: Answers, split: str, splits: Splits) -> Metric:
    answers, generated = [question.answer for question in splits[split]], own.generated[split]
    recalls = rouge_recalls(answers, generated)
    entries = [
        {"rougeL_recall": recall, "input": question.question, "ground_truth": question.answer, "generation": text}
        for recall, question, text in zip(recalls, splits[split], generated, strict=True)
    ]
    return Metric(sum(recalls) / len(recalls), entries)


def _membership(own: Answers, splits: Splits, retrained: Answers | None, base: Answers | None) -> dict[str, Metric]:
    areas = _areas(own, splits, base)
    found = {f"mia_{name}": Metric(area) for name, area in areas.items()}
    if retrained is not None:
        found["privleak"] = Metric(attacks.privacy_leak(areas["min_k"], _areas(retrained, splits, base)["min_k"]))
    return found


def _areas(answers: Answers, splits: Splits, base: Answers | None) -> dict[str, float]:
    def of(split: str) -> Mapping[str, Tensor]:
        texts = [question.answer for question in splits[split]]
        known = None if base is None else base.scores[split]["answer"]
        return attacks.signals(answers.scores[split]["answer"], texts, known)

    forget, holdout = of("forget"), of("holdout")
    return {name: attacks.auc(forget[name], holdout[name]) for name in forget}


def _probabilities(scores: TokenScores) -> Metric:
    probabilities, losses = scores.probabilities, scores.losses
    entries = [
        {"prob": prob, "avg_loss": loss} for prob, loss in zip(probabilities.tolist(), losses.tolist(), strict=True)
    ]
    return Metric(float(probabilities.mean()), entries)


def _mean(name: str, values: Tensor) -> Metric:
    return Metric(float(values.mean()), [{name: value} for value in values.tolist()])
