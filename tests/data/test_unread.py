"""Labels in a form that is not read are told, and what is no label is not taken for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from networks import mlp
from unmerge import Recipe, collect, fit
from unmerge.data.unread import unread_labels
from unmerge.errors import UnmergeWarning

INPUTS = torch.randn(6, 6)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ((INPUTS, LABELS.tolist()), "a list: pass torch.tensor"),
        ((INPUTS, LABELS.numpy()), "an ndarray: pass torch.tensor"),
        ((INPUTS, LABELS.double()), r"torch.float64: pass it .long()"),
        ((INPUTS, LABELS.unsqueeze(1)), ".squeeze(1).long()"),
        ((INPUTS, torch.nn.functional.one_hot(LABELS)), ".argmax(1)"),
        ((INPUTS, torch.nn.functional.one_hot(LABELS).float()), ".argmax(1)"),
        ({"x": INPUTS, "labels": LABELS.tolist()}, "'labels' is a list"),
        ({"x": INPUTS, "label": LABELS}, "called 'label': rename them to 'labels'"),
        ({"x": INPUTS, "label_ids": LABELS}, "called 'label_ids'"),
        ({"x": INPUTS, "label": LABELS.tolist()}, "'label' is a list: pass torch.tensor(...) of it, and rename it"),
        ({"x": INPUTS, "targets": LABELS.numpy()}, "'targets' is an ndarray"),
        ({"x": INPUTS, "group": LABELS.tolist()}, "'group' is a list"),
        ({"x": INPUTS, "group": LABELS.double(), "labels": LABELS}, "'group' is of torch.float64"),
    ],
)
def test_labels_in_another_form_are_told(batch: Any, told: str) -> None:
    found = unread_labels(batch)
    assert found is not None
    assert told in found


@pytest.mark.parametrize(
    "batch",
    [
        INPUTS,
        (INPUTS,),
        (INPUTS, LABELS),
        (INPUTS, LABELS.int()),
        (INPUTS, torch.rand(6)),  # what a regression is to give
        (INPUTS, torch.rand(6, 4)),
        (INPUTS, torch.ones(6, 4, dtype=torch.int64)),  # an attention mask
        (INPUTS, torch.ones(6, dtype=torch.bool)),
        (INPUTS, torch.ones(3, 6)),
        (INPUTS, [torch.ones(1)] * 6),
        (INPUTS, "abcdef"),
        (INPUTS, [True] * 6),
        (INPUTS, np.array(3)),
        (INPUTS, np.array(["cat"] * 6)),
        (INPUTS, np.random.rand(6)),
        (INPUTS, np.random.rand(6, 4)),
        {"x": INPUTS, "labels": torch.ones(6, 9, dtype=torch.int64)},  # tokens
        {"x": INPUTS, "labels": LABELS, "label": LABELS},
        {"x": INPUTS, "label": torch.rand(6)},
    ],
)
def test_nothing_else_is_taken_for_labels(batch: Any) -> None:
    assert unread_labels(batch) is None


def test_a_request_whose_labels_are_not_read_says_so() -> None:
    model = mlp(dtype=torch.float32)
    with pytest.warns(UnmergeWarning, match=r"forget: the labels .* one-hot: pass it .argmax\(1\)"):
        collect(model, [(INPUTS, torch.nn.functional.one_hot(LABELS))], what="forget")
    retain = [(torch.randn(40, 6) + 1, torch.arange(40) % 2)]
    recipe = Recipe(skip_layers=0, rank=1, retain_rank=1)
    with pytest.warns(UnmergeWarning, match="forget: the labels of the batches are not read, since its second entry"):
        fit(model, [(INPUTS, [3] * 6)], retain, init="zero", recipe=recipe, on_verdict="ignore")
