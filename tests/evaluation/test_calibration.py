"""Expected calibration error by hand."""

import pytest
import torch

from unmerge.evaluation.calibration import expected_calibration_error, observe
from unmerge.evaluation.predictions import Outputs
from unmerge.evaluation.subject import NotMeasurable, Setting, Subject


def test_by_hand() -> None:
    probabilities = torch.tensor([[0.95, 0.05], [0.91, 0.09], [0.58, 0.42], [0.45, 0.55]])
    labels = torch.tensor([0, 1, 0, 0])
    # Ten bins: (.9, 1] holds .95 right and .91 wrong, (.5, .6] holds .58 right and .55 wrong.
    expected = (abs(1 - 1.86) + abs(1 - 1.13)) / 4
    assert expected_calibration_error(probabilities.log(), labels, 10) == pytest.approx(expected, abs=1e-6)


def test_sure_and_right_is_calibrated_and_sure_and_wrong_is_not() -> None:
    logits = torch.tensor([[100.0, 0.0]]).expand(8, 2)
    assert expected_calibration_error(logits, torch.zeros(8, dtype=torch.int64)) == pytest.approx(0)
    assert expected_calibration_error(logits, torch.ones(8, dtype=torch.int64)) == pytest.approx(1)


def test_samples_of_the_stated_probability_are_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40_000, 3, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    assert expected_calibration_error(logits, labels) < 0.01
    assert expected_calibration_error(3 * logits, labels) > 0.1


def test_needs_retain_or_test() -> None:
    with pytest.raises(NotMeasurable, match="retain or the test split"):
        observe(Subject("m", Outputs({})), Setting())
