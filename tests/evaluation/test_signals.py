"""Signals on fixed probabilities, worked out by hand."""

from math import log

import pytest
import torch

from unmerge.evaluation.signals import (
    confidence,
    correctness,
    entropy,
    log_odds,
    modified_entropy,
    public_modified_entropy,
)

P = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
Y = torch.tensor([0, 0, 0])


def test_correctness_and_confidence() -> None:
    assert correctness(P, Y).tolist() == [1, 0, 1]
    assert confidence(P, Y).tolist() == [0.5, 0.1, 1.0]


def test_entropy() -> None:
    expected = [0.5 * log(2) + 0.5 * log(4), -0.2 * log(0.1) - 0.8 * log(0.8), 0]
    assert entropy(P).tolist() == pytest.approx(expected)


def test_modified_entropy() -> None:
    expected = [
        -0.5 * log(0.5) - 2 * 0.25 * log(0.75),
        -0.9 * log(0.1) - 0.8 * log(0.2) - 0.1 * log(0.9),
        0,
    ]
    assert modified_entropy(P, Y).tolist() == pytest.approx(expected)


def test_modified_entropy_of_a_sure_mistake_is_large_and_finite() -> None:
    sure = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert modified_entropy(sure, torch.tensor([0])).item() == pytest.approx(-2 * log(1e-30))


def test_modified_entropy_keeps_what_is_small_beside_certainty() -> None:
    sure = torch.tensor([[1.0, 1e-3]])  # single precision; log(1 - 1) alone would be -69
    expected = -(torch.tensor(1e-3) * torch.tensor(1 - 1e-3).log()).item()
    assert modified_entropy(sure, torch.tensor([0])).item() == pytest.approx(expected, rel=1e-4)


def test_public_modified_entropy_swaps_the_columns_of_all_labels() -> None:
    labels = torch.tensor([0, 1, 0])  # so the columns 0 and 1, in every row
    expected = [
        -0.5 * log(0.5) - 0.75 * log(0.25) - 0.25 * log(0.25),
        -0.9 * log(0.1) - 0.2 * log(0.8) - 0.1 * log(0.1),
        -0 * log(1) - 1 * log(1e-30) - 0 * log(1e-30),
    ]
    assert public_modified_entropy(P, labels).tolist() == pytest.approx(expected)


def test_log_odds() -> None:
    assert log_odds(P[:2].log(), Y[:2]).tolist() == pytest.approx([0, log(1 / 9)])
    extreme = torch.tensor([[-1e4, 3.0, 3.0], [500.0, 0, 0], [-torch.inf, 0, 0]])
    assert log_odds(extreme, Y).tolist() == pytest.approx([-1e4 - 3 - log(2), 500 - log(2), -1e5])
