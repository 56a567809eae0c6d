"""Sums that were taken about different pivots, brought to one before they are added up."""

from __future__ import annotations

import pytest
import torch

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.collecting.reduction import Counted, of_all
from unmerge.sums.moments import Moments


@pytest.mark.parametrize("shape", [(9, 4), (3, 9, 4)])
def test_another_pivot_leaves_mean_and_scatter(shape):
    rows = 50 + torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = Moments.of(rows)
    pivot = moments.pivot + torch.linspace(-2, 3, shape[-1], dtype=torch.float64)
    moved = moments.clone().move_pivot_(pivot)
    shifted = rows - pivot.unsqueeze(-2)
    assert moved.pivot.equal(pivot)
    torch.testing.assert_close(moved.total, shifted.sum(-2))
    torch.testing.assert_close(moved.gram, shifted.mT @ shifted)
    torch.testing.assert_close(moved.mean, moments.mean)
    torch.testing.assert_close(moved.scatter, moments.scatter)


def test_one_process_has_counted_all():
    own = Counted({"fc": LayerStatistics(Moments.of(torch.ones(3, 2)))}, {}, ["fc"], {}, {4: 3}, samples=3)
    assert of_all(own, {}, lambda name: torch.device("cpu")) is own
    assert own.labels == [4]
