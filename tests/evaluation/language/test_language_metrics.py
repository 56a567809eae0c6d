"""Memorisation, membership signals and truth ratios against their definitions, token by token."""

from __future__ import annotations

import math
import zlib

import pytest
import torch

from unmerge.evaluation.language import TokenScores, attacks, tofu
from unmerge.evaluation.language.memorization import exact_memorization, extraction_strength


def scores_of(*sequences):
    """Scores from the log-probabilities and hits of each sequence, both ending with those of the end token."""
    lengths = torch.tensor([len(log_probs) for log_probs, _ in sequences])
    log_probs = torch.tensor([value for part, _ in sequences for value in part])
    hits = torch.tensor([bool(value) for _, part in sequences for value in part])
    expected = -torch.arange(len(hits)) / 10 - 1
    return TokenScores(lengths, log_probs, hits, expected, torch.full_like(expected, 0.5))


two = scores_of(([-0.1, -3.0, -0.2, -0.4, -9.0], [1, 0, 1, 1, 0]), ([-1.0, -2.0, -5.0], [1, 0, 1]))


def test_memorisation_counts_the_answer_without_its_end():
    assert exact_memorization(two).tolist() == [3 / 4, 1 / 2]
    # The first is completed from its third token on; of the second not even the last token comes.
    assert extraction_strength(two).tolist() == [1 - 2 / 4, 1 - 1 / 2]
    whole = scores_of(([-0.1, -0.1, -0.1], [1, 1, 0]))
    assert extraction_strength(whole).tolist() == [1.0]


def test_min_k_is_the_mean_of_the_least_likely_tokens():
    # 40 % of 4 tokens is 1, of 2 tokens at least 1.
    assert attacks.least_likely(two).tolist() == pytest.approx([3.0, 2.0])
    assert attacks.least_likely(two, share=0.8).tolist() == pytest.approx([(3.0 + 0.4 + 0.2) / 3, 2.0])
    standardised = [(-0.1 + 1.0) / 0.5, (-3.0 + 1.1) / 0.5, (-0.2 + 1.2) / 0.5, (-0.4 + 1.3) / 0.5]
    assert attacks.least_likely(two, standardised=True)[0].item() == pytest.approx(-min(standardised))


def test_loss_zlib_and_reference_signals():
    texts = ["a long long long answer", "short"]
    base = scores_of(([-1.0] * 5, [0] * 5), ([-2.0] * 3, [0] * 3))
    found = attacks.signals(two, texts, base)
    losses = [12.7 / 5, 8 / 3]
    assert found["loss"].tolist() == pytest.approx(losses)
    packed = [len(zlib.compress(text.encode())) for text in texts]
    assert found["zlib"].tolist() == pytest.approx([loss / size for loss, size in zip(losses, packed, strict=True)])
    assert found["reference"].tolist() == pytest.approx([losses[0] - 1, losses[1] - 2])
    assert "reference" not in attacks.signals(two, texts)


def test_the_area_counts_pairs_and_half_of_the_ties():
    forget, holdout = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0])
    assert attacks.auc(forget, holdout) == pytest.approx((1 + 0.5 + 0 + 3) / 6)
    assert attacks.privacy_leak(0.9, 0.6) == pytest.approx(-75.0)
    assert attacks.privacy_leak(0.6, 0.6) == 0


def test_truth_ratio_compares_the_mean_wrong_loss_with_the_right_one():
    right, wrong = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0, 1.0])
    found = tofu.truth_ratios(right, wrong, [2, 1])
    assert found.tolist() == pytest.approx([math.exp(-3) / math.exp(-1), math.exp(-1) / math.exp(-2)])


def test_forget_quality_is_the_p_value_of_the_largest_gap_between_the_distributions():
    # Two samples of three that do not overlap: of the 20 ways to draw them 2 are as far apart.
    assert tofu.forget_quality(torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])) == pytest.approx(0.1)
    same = torch.linspace(0, 1, 50)
    assert tofu.forget_quality(same, same) == 1


def test_the_harmonic_mean():
    assert tofu.harmonic_mean([0.5, 0.25]) == pytest.approx(1 / 3)
    assert tofu.harmonic_mean([0.5, 0.0]) == 0
