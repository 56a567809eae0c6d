"""Divergence and task vectors, by hand."""

from math import log

import pytest
import torch

from networks import mlp
from unmerge.evaluation.fidelity import compare, divergence, task_vector_fidelity
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.subject import NotMeasurable, Setting, Subject


def test_divergence_by_hand() -> None:
    own, other = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    expected = [0.5 * log(2) + 0.5 * log(2 / 3), 0]
    assert divergence(own.log(), other.log()).tolist() == pytest.approx(expected, abs=1e-7)


def test_divergence_with_removed_classes_is_finite() -> None:
    kept, removed, gone = (torch.tensor([[0.0, 0.0, value]]) for value in (0.0, -1e4, -torch.inf))
    assert divergence(removed, kept).item() == pytest.approx(log(3 / 2))
    assert divergence(gone, kept).item() == pytest.approx(log(3 / 2))
    # A third of the mass on a class that the other has at e⁻³⁰.
    expected = 2 / 3 * log(2 / 3) + 1 / 3 * (log(1 / 3) + 30)
    assert divergence(kept, removed).item() == pytest.approx(expected)
    assert divergence(kept, gone).item() == pytest.approx(expected)
    for logits in (removed, gone):
        assert divergence(logits, logits).item() == 0


def test_task_vectors_by_hand() -> None:
    initial = {"a": torch.ones(1, 2), "b": torch.zeros(2, 3)}
    retrained = {"a": torch.tensor([[4.0, 5.0]]), "b": torch.ones(2, 3)}  # task vectors (3, 4) and ones
    own = {"a": torch.tensor([[5.0, -2.0]]), "b": 2 * torch.ones(2, 3)}  # (4, −3) and twos
    error, cosine = task_vector_fidelity(own, retrained, initial)
    assert error == pytest.approx((50**0.5 / 5 + 1) / 2)
    assert cosine == pytest.approx((2 * 0 + 6 * 1) / 8)
    assert task_vector_fidelity(retrained, retrained, initial) == pytest.approx((0, 1))


def subject(module: torch.nn.Module | None, logits: torch.Tensor) -> Subject:
    return Subject("m", Outputs({"forget": SplitOutputs(logits, torch.tensor([0]), torch.tensor([1]))}), module)


def test_weights_are_compared_where_there_are_any() -> None:
    first, second = mlp(seed=0), mlp(seed=1)
    own, retrained = subject(first, torch.zeros(1, 4)), subject(second, torch.zeros(1, 4))
    row = {c.label: f.value for c, f in compare(own, retrained, Setting(init="zero")).rows["fidelity"].items()}
    expected = task_vector_fidelity(
        *({name: value for name, value in model.named_parameters() if value.dim() > 1} for model in (first, second)),
        {name: torch.zeros_like(value) for name, value in first.named_parameters()},
    )
    assert (row["relative error"], row["cosine"]) == pytest.approx(expected)
    assert row["KL forget"] == 0


def test_what_is_missing() -> None:
    own = subject(mlp(), torch.zeros(1, 4))
    bare = subject(None, torch.zeros(1, 4))
    wider = subject(mlp((6, 9, 4)), torch.zeros(1, 4))
    assert "init=" in compare(own, own, Setting()).missing["task vectors"]
    assert "only outputs" in compare(bare, own, Setting(init="zero")).missing["task vectors"]
    assert "no matrix" in compare(wider, own, Setting(init="zero")).missing["task vectors"]
    assert "same weights" in compare(own, own, Setting(init=own.module)).missing["task vectors"]
    with pytest.raises(NotMeasurable, match="reference"):
        compare(own, None, Setting())
