"""Intervals: the multinomial draw is the bootstrap, and covers what it should."""

import numpy as np
import pytest
import torch

from unmerge.evaluation.bootstrap import paired_means, resampled_means, with_interval


def test_draws_have_the_moments_of_resampling() -> None:
    first = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1]).bool()
    second = torch.tensor([1, 0, 0, 1, 0, 1, 1, 1]).bool()
    drawn = resampled_means([first, second], 200_000, 0)
    rows = np.stack([first.numpy(), second.numpy()]).astype(float)
    # Of means of n samples drawn with replacement: the covariance of the samples over n.
    assert np.allclose(drawn.mean(1), rows.mean(1), atol=2e-3)
    assert np.allclose(np.cov(drawn), np.cov(rows, bias=True) / 8, atol=5e-4)


def test_draws_are_fixed_by_the_seed() -> None:
    hits = torch.arange(30) % 3 == 0
    assert np.array_equal(resampled_means([hits], 50, 1, 2), resampled_means([hits], 50, 1, 2))
    assert not np.array_equal(resampled_means([hits], 50, 1, 2), resampled_means([hits], 50, 1, 3))


def test_answers_to_other_samples_are_drawn_apart() -> None:
    own, other = torch.arange(30) % 3 == 0, torch.arange(20) % 2 == 0
    drawn = paired_means(own, other, 2000, 0)
    assert drawn.mean(1) == pytest.approx([1 / 3, 1 / 2], abs=0.01)
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.1
    assert np.array_equal(*paired_means(own, own, 50, 0))


def test_intervals_cover() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(400):
        hits = torch.rand(200, generator=generator) < 0.8
        figure = with_interval(hits.double().mean().item(), resampled_means([hits], 500, trial)[0], 0.95)
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= figure.value <= figure.high
        covered += figure.low <= 0.8 <= figure.high
    assert 0.91 <= covered / 400 <= 0.98


def test_all_right_has_no_spread() -> None:
    figure = with_interval(1.0, resampled_means([torch.ones(9, dtype=torch.bool)], 100, 0)[0], 0.95)
    assert (figure.low, figure.high) == (1.0, 1.0)
