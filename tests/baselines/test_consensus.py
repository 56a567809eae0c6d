"""NegMerge subtracts the mean of several vectors where all have one sign."""

from __future__ import annotations

import literal
import pytest
import torch

from networks import mlp, request
from unmerge.baselines import BaselineError, neg_merge
from unmerge.baselines.consensus import unanimous

forget, retain = request((5,), each=6)


def test_only_entries_of_one_sign_are_averaged():
    changes = torch.tensor([[1.0, -1.0, 2.0, 0.0, -3.0], [2.0, -2.0, -2.0, 0.0, 0.0], [3.0, -6.0, 3.0, 0.0, -1.0]])
    assert unanimous(changes).tolist() == [2.0, -3.0, 0.0, 0.0, 0.0]


def test_three_vectors_equal_the_formula():
    model = mlp((5, 7, 3))
    # Steps so long that the vectors disagree in places.
    found = neg_merge(model, [forget], alpha=0.6, epochs=3, lr=1.0, momentum=0.9, weight_decay=0.01)
    before = literal.weights_of(model)
    vectors = []
    for rate in (0.5, 1.0, 2.0):
        tuned = literal.descend(
            before, [lambda weights: literal.cross_entropy(weights, *forget)] * 3, [rate] * 3, 0.9, 0.01
        )
        vectors.append({name: tuned[name] - before[name] for name in before})
    expected, disagreements = {}, 0
    for name, weight in before.items():
        expected[name] = weight.clone()
        for place in range(weight.numel()):
            entries = [vector[name].flatten()[place].item() for vector in vectors]
            if all(entry > 0 for entry in entries) or all(entry < 0 for entry in entries):
                expected[name].view(-1)[place] -= 0.6 * sum(entries) / 3
            else:
                disagreements += 1
    assert disagreements > 0
    assert literal.agree(found, expected, 1e-10)


@pytest.mark.parametrize("rates", [[], "1", [0.5, -1], 2])
def test_rates_are_factors(rates):
    with pytest.raises(BaselineError, match="rates="):
        neg_merge(mlp((5, 7, 3)), [forget], [retain], rates=rates)
