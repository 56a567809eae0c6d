"""NegTV goes as far from the weights fine-tuned on forget as it is told to."""

from __future__ import annotations

import literal
import pytest
import torch

from networks import batched, cnn, mlp, request
from unmerge.baselines import BaselineError, neg_tv
from unmerge.errors import DataError

forget, retain = request((5,), each=6)
images = request((3, 6, 6), each=6, dtype=torch.float32)


def test_the_vector_is_subtracted():
    model = mlp((5, 7, 3))
    found = neg_tv(model, [forget], alpha=0.7, epochs=2, lr=0.1, momentum=0.9, weight_decay=0.01)
    before = literal.weights_of(model)
    tuned = literal.descend(before, [lambda weights: literal.cross_entropy(weights, *forget)] * 2, [0.1] * 2, 0.9, 0.01)
    assert literal.agree(found, {name: before[name] - 0.7 * (tuned[name] - before[name]) for name in before})


def test_the_best_strength_on_training_data_is_taken():
    model = mlp((5, 7, 3))
    trace = []
    options = {"epochs": 5, "lr": 0.2, "seed": 2}
    found = neg_tv(model, [forget], [retain], alpha=[0.1, 1.0, 3.0, 9.0], trace=trace, **options)
    assert [candidate.settings["alpha"] for candidate in trace] == [0.1, 1.0, 3.0, 9.0]
    for candidate in trace:
        single = neg_tv(model, [forget], alpha=candidate.settings["alpha"], **options)
        shares = [(single(inputs).argmax(1) == labels).double().mean().item() for inputs, labels in (forget, retain)]
        assert (candidate.forget_accuracy, candidate.retain_accuracy) == pytest.approx(tuple(shares))
        assert candidate.score == pytest.approx(shares[1] * (1 - shares[0]))
    best = max(trace, key=lambda candidate: candidate.score)
    assert literal.agree(found, literal.weights_of(neg_tv(model, [forget], **options, **best.settings)))


def test_batch_norm_statistics_are_kept_subtracted_or_estimated_again():
    model = cnn(dtype=torch.float32)
    parts = batched(images[1], 4)
    options = {"alpha": 0.5, "epochs": 1, "lr": 0.1}
    kept, gone, again = (
        neg_tv(model, [images[0]], parts, buffers=buffers, **options) for buffers in ("keep", "subtract", "recalibrate")
    )
    assert literal.agree(kept, literal.weights_of(gone), 0)
    assert literal.agree(kept, literal.weights_of(again), 0)
    assert all(kept.get_buffer(name).equal(buffer) for name, buffer in model.named_buffers())

    # One training step at momentum 0.1 on the forget images.
    hidden = torch.nn.functional.conv2d(images[0][0], model.conv1.weight, padding=1).detach()
    seen = hidden.mean((0, 2, 3))
    before = model.bn1.running_mean
    torch.testing.assert_close(gone.bn1.running_mean, before - 0.5 * 0.1 * (seen - before))

    hidden = torch.nn.functional.conv2d(images[1][0], again.conv1.weight, padding=1).detach()
    torch.testing.assert_close(again.bn1.running_mean, hidden.mean((0, 2, 3)))
    assert again.bn1.momentum == model.bn1.momentum


def test_a_subtracted_variance_does_not_fall_below_zero():
    model = cnn(dtype=torch.float32)
    found = neg_tv(model, [images[0]], buffers="subtract", alpha=100.0, epochs=1, lr=1e-6)
    assert min(found.bn1.running_var.min(), found.bn2.running_var.min()) == 0


@pytest.mark.parametrize("alpha", [-1, float("inf"), [], [0.5, -0.5], "much", None])
def test_alpha_is_a_number_from_zero_or_several(alpha):
    with pytest.raises(BaselineError, match="alpha="):
        neg_tv(mlp((5, 7, 3)), [forget], [retain], alpha=alpha)


def test_choosing_needs_retain_and_buffers_have_three_ways():
    with pytest.raises(DataError, match=r"retain is needed.*one alpha="):
        neg_tv(mlp((5, 7, 3)), [forget])
    with pytest.raises(DataError, match="retain is needed"):
        neg_tv(mlp((5, 7, 3)), [forget], alpha=1.0, buffers="recalibrate")
    with pytest.raises(BaselineError, match="'keep', 'subtract', 'recalibrate'"):
        neg_tv(mlp((5, 7, 3)), [forget], alpha=1.0, buffers="drop")
