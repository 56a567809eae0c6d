"""Nested results of two runs, compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_close(found: Any, expected: Any, tolerance: float, place: str = "") -> None:
    """Assert that all numbers agree within a share of the largest of their tensor, and all else is the same."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), f"{place}: {found}"
        assert list(found) == list(expected), place
        for key, value in expected.items():
            check_close(found[key], value, tolerance, f"{place}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            check_close(found[index], value, tolerance, f"{place}/{index}")
    elif isinstance(expected, (Tensor, float)) and expected is not None:
        found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        assert found.shape == expected.shape, place
        if expected.numel():
            assert (found - expected).abs().max() <= tolerance * max(1e-3, expected.abs().max().item()), place
    else:
        assert found == expected, place
