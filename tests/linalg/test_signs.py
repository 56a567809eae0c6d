"""Signs are random enough to stand for a space, and the same for ever."""

from __future__ import annotations

import torch

from unmerge.linalg.signs import signs


def test_signs_are_balanced_independent_and_the_first_columns_of_more():
    found = signs(400, 96, torch.zeros(1))
    assert found.unique().tolist() == [-1, 1]
    assert found.mean().abs() < 0.02
    inner = found.mT @ found / 400 - torch.eye(96)
    assert inner.abs().max() < 0.25, "columns are nearly orthogonal"
    assert torch.linalg.cond(found) < 4
    assert signs(400, 17, torch.zeros(1)).equal(found[:, :17])
    assert signs(90, 17, torch.zeros(1)).equal(found[:90, :17])
    # Files hold products with these: they must never change.
    assert found[:4, :8].int().tolist() == SIGNS


SIGNS = [
    [-1, -1, 1, 1, -1, -1, 1, 1],
    [1, 1, 1, -1, -1, -1, 1, -1],
    [1, -1, -1, -1, -1, -1, 1, 1],
    [-1, -1, -1, 1, -1, 1, 1, -1],
]


def test_signs_are_held_only_as_long_as_somebody_holds_them():
    found = signs(30, 5, torch.zeros(1))
    assert signs(30, 5, torch.zeros(1)) is found
    doubled = signs(30, 5, torch.zeros(1, dtype=torch.float64))
    assert doubled.dtype == torch.float64
    assert doubled.float().equal(found)
