"""How many steps a request makes for each layer: on a GPU a small request takes as long as these take to launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import unmerge
from networks import mlp
from unmerge.bench.stopwatch import operations

FEW, MANY, CLASSES, WIDTH = 4, 12, 10, 24
RECIPE = unmerge.Recipe(skip_layers=0)


def batches(forgotten: bool | None = None) -> list[tuple[Tensor, Tensor]]:
    """Rows of ten classes, or of the first alone, or of the others."""
    labels = torch.arange(200) % CLASSES
    rows = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(0)) + 2 * labels.unsqueeze(1)
    chosen = torch.ones(200, dtype=torch.bool) if forgotten is None else (labels == 0) == forgotten
    return [(rows[chosen], labels[chosen])]


def class_request(model: Any) -> Callable[[], object]:
    whole = unmerge.collect(model, batches())
    return lambda: unmerge.fit(model, classes=[0], statistics=whole, init="zero", recipe=RECIPE)


def next_request(model: Any) -> Callable[[], object]:
    whole = unmerge.collect(model, batches())
    part = unmerge.collect(model, batches(True), whole)
    return lambda: unmerge.fit(model, part, whole - part, init="zero", recipe=RECIPE)


def pass_over_forget(model: Any) -> Callable[[], object]:
    whole = unmerge.collect(model, batches())
    return lambda: unmerge.collect(model, batches(True), whole)


@pytest.mark.parametrize(("request_of", "most"), [(class_request, 110), (next_request, 155), (pass_over_forget, 95)])
def test_a_layer_more_costs_a_request_few_steps(request_of: Callable[..., Callable[[], object]], most: int) -> None:
    counts = []
    for layers in (FEW, MANY):
        made = request_of(mlp([WIDTH] * layers + [CLASSES], dtype=torch.float32))
        made()  # what is kept with the statistics of everything is made by the first request
        counts.append(operations(made))
    assert (counts[1] - counts[0]) / (MANY - FEW) <= most
