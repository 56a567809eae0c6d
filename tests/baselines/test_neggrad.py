"""NegGrad+ descends on retain and ascends on forget, as written."""

from __future__ import annotations

import literal
import pytest
import torch

from networks import batched, mlp, request
from unmerge.baselines import BaselineError, neggrad_plus

forget, retain = request((5,), each=6)  # 6 samples and 12


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_two_steps_equal_the_formula(alpha):
    model = mlp((5, 7, 3))
    kept = retain[0][:6], retain[1][:6]  # as many as forget, so that each epoch takes all
    found = neggrad_plus(
        model, [forget], [kept], alpha=alpha, epochs=2, lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=6
    )

    def loss(weights):
        return alpha * literal.cross_entropy(weights, *kept) - (1 - alpha) * literal.cross_entropy(weights, *forget)

    assert literal.agree(found, literal.descend(literal.weights_of(model), [loss] * 2, [0.1] * 2, 0.9, 0.01))


def count_reads(**options):
    """How many samples of forget and retain one epoch reads."""
    read = {"forget": 0, "retain": 0}

    def forward(model, batch):
        if model.training:
            read["forget" if (batch[1] == 0).all() else "retain"] += len(batch[1])
        return model(batch[0])

    neggrad_plus(mlp((5, 7, 3)), [forget], [retain], epochs=1, batch_size=4, forward=forward, **options)
    return read


def test_an_epoch_reads_forget_and_as_many_of_retain_or_retain_and_forget_again():
    assert count_reads() == {"forget": 6, "retain": 6}
    assert count_reads(epoch_over="retain") == {"forget": 12, "retain": 12}


def test_other_retain_samples_are_drawn_each_epoch():
    seen = []

    def forward(model, batch):
        if model.training and (batch[1] != 0).all():
            seen.append(batch[0])
        return model(batch[0])

    neggrad_plus(mlp((5, 7, 3)), [forget], batched(retain, 5), epochs=4, forward=forward)
    assert [len(batch) for batch in seen] == [6] * 4
    assert len(torch.cat(seen).unique(dim=0)) > 6


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), "half", True])
def test_alpha_is_a_share(alpha):
    with pytest.raises(BaselineError, match=r"alpha=.*from 0 to 1"):
        neggrad_plus(mlp((5, 7, 3)), [forget], [retain], alpha=alpha)


def test_an_epoch_is_over_one_of_the_pools():
    with pytest.raises(BaselineError, match="'forget', 'retain'"):
        neggrad_plus(mlp((5, 7, 3)), [forget], [retain], epoch_over="both")


def test_a_training_that_diverges_says_so():
    with pytest.raises(BaselineError, match=r"NegGrad\+ diverged.*Lower lr"):
        neggrad_plus(mlp((5, 7, 3)), [forget], [retain], alpha=0.0, epochs=60, lr=1e6)
