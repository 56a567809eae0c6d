"""The linear probe: against scikit-learn's ridge, and on features that do or do not tell the class."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from unmerge.evaluation.decodability import compare, observe, probe_hits, ridge_probe
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.subject import NotMeasurable, Setting, Subject


def clouds(classes: list[int], each: int, width: int, apart: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes).repeat(each)
    centres = apart * torch.randn(10, width, generator=torch.Generator().manual_seed(99))
    return torch.randn(len(labels), width, generator=generator) + centres[labels], labels


@pytest.mark.parametrize("width", [5, 60])  # fewer features than samples, and more
def test_probe_is_weighted_ridge_regression(width: int) -> None:
    features, labels = clouds([0, 0, 0, 4, 7, 7], 7, width, 1.0)
    weights, offsets, classes = ridge_probe(features, labels, 0.1)
    assert classes.tolist() == [0, 4, 7]
    share = np.array([1 / (3 * (labels == label).sum().item()) for label in labels])
    rows = features.double().numpy()
    scatter = share @ (rows - share @ rows) ** 2
    theirs = Ridge(alpha=0.1 * scatter.sum() / width)
    theirs.fit(rows, (labels[:, None] == classes).double().numpy(), sample_weight=share)
    assert np.allclose(weights.numpy(), theirs.coef_.T, atol=1e-8)
    assert np.allclose(offsets.numpy(), theirs.intercept_, atol=1e-8)


def test_probe_reads_what_is_there_and_nothing_else() -> None:
    retain = clouds([2, 3, 4], 60, 8, 3.0, seed=1)
    there = probe_hits(clouds([0, 1], 50, 8, 3.0), retain)
    noise = torch.randn(100, 8, generator=torch.Generator().manual_seed(5))
    gone = probe_hits((noise, torch.arange(100) % 2), retain)
    assert there[0].double().mean() > 0.95
    assert there[1].double().mean() > 0.95
    assert gone[0].double().mean() < 0.7
    assert len(there[0]) == 50


def subject(apart: float) -> Subject:
    splits = {}
    for place, (name, classes) in enumerate({"forget": [0, 1], "retain": [2, 3]}.items()):
        features, labels = clouds(classes, 30, 6, apart, place)
        rows = torch.arange(len(labels))
        splits[name] = SplitOutputs(torch.zeros(len(labels), 4), labels, rows, features, rows)
    return Subject("m", Outputs(splits))


def test_gap_to_the_reference() -> None:
    own, retrained = subject(4.0), subject(0.0)
    seen, reference = observe(own, Setting()), observe(retrained, Setting())
    row = {c.label: f for c, f in compare(seen, reference, Setting()).rows["decodability"].items()}
    assert row["gap"].value == pytest.approx(row["probe forget"].value - reference["forget"].double().mean().item())
    assert row["gap"].low > 0
    assert "reference" in compare(seen, None, Setting()).missing["gap"]


def test_needs_features() -> None:
    bare = {name: SplitOutputs(p.logits, p.labels, p.keys) for name, p in subject(1.0).outputs.splits.items()}
    with pytest.raises(NotMeasurable, match="keep_features"):
        observe(Subject("m", Outputs(bare)), Setting())
