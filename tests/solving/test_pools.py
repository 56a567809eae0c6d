"""What a layer knows of its classes where some of them have no row in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unmerge
from unmerge.recipe import Recipe


@pytest.mark.parametrize("absent", [0, 3], ids=["a forgotten class", "a retained class"])
@pytest.mark.parametrize("basis", ["auto", "blend", "lda", "private-mean"])
def test_a_class_whose_rows_are_all_masked_changes_nothing(basis: str, absent: int) -> None:
    """As a class whose tokens never reach an expert: the edit is that of the data without it."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    labels = torch.arange(50) % 5
    inputs = torch.randn(50, 1, 6, generator=generator, dtype=torch.float64) + labels.reshape(-1, 1, 1)
    keep = (labels != absent).reshape(-1, 1)
    recipe = Recipe(basis=basis, skip_layers=0, head="edit", ridge=1e-2)

    def fitted(which: torch.Tensor) -> unmerge.Edit:
        def part(chosen: torch.Tensor) -> list[dict[str, torch.Tensor]]:
            rows = chosen & which
            return [{"input": inputs[rows], "labels": labels[rows], "keep": keep[rows]}]

        options = {"mask": "keep", "forward": lambda module, batch: module(batch["input"])}
        return unmerge.fit(model, part(labels < 2), part(labels >= 2), init="zero", recipe=recipe, **options)

    found, expected = fitted(labels >= 0), fitted(labels != absent)
    for name, layer in expected.layers.items():
        own = found.layers[name]
        assert torch.allclose(own.B @ own.Q.mT, layer.B @ layer.Q.mT, atol=1e-8), name
