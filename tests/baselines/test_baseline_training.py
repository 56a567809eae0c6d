"""The shared loop: schedules, options, augmentation, autocast, and a model left in the mode it had."""

from __future__ import annotations

import math

import literal
import pytest
import torch
from torch import nn

from networks import cnn, mlp, request
from unmerge.baselines import BaselineError, Training, fine_tune
from unmerge.baselines.training import SCHEDULES

forget, retain = request((5,), each=6)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.1] * 4),
        ("cosine", [0.05 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]),
        ("steps", [0.1, 0.1, 0.01, 0.001]),
    ],
)
def test_a_schedule_scales_the_rate_of_each_step(schedule, rates):
    model = mlp((5, 7, 3))
    found = fine_tune(model, None, [retain], epochs=4, lr=0.1, momentum=0.0, weight_decay=0.0, schedule=schedule)
    losses = [lambda weights: literal.cross_entropy(weights, *retain)] * 4
    assert literal.agree(found, literal.descend(literal.weights_of(model), losses, rates, 0.0, 0.0))


def test_schedules_start_at_the_full_rate():
    assert [schedule(0.0) for schedule in SCHEDULES.values()] == [1.0, 1.0, 1.0]


def test_inputs_are_augmented_in_training_alone_and_mappings_too():
    seen = []

    def augment(inputs):
        seen.append(len(next(iter(inputs.values()))) if isinstance(inputs, dict) else len(inputs))
        return {"input": inputs["input"] + 1} if isinstance(inputs, dict) else inputs + 1

    model = mlp((5, 7, 3))
    options = {"epochs": 2, "lr": 0.1, "batch_size": 6}
    found = fine_tune(model, None, [retain], augment=augment, **options)
    assert seen == [6] * 4
    by_hand = fine_tune(model, None, [(retain[0] + 1, retain[1])], **options)
    assert literal.agree(found, literal.weights_of(by_hand), 0)
    mapping = [{"input": retain[0], "labels": retain[1]}]
    assert literal.agree(fine_tune(model, None, mapping, augment=augment, **options), literal.weights_of(by_hand), 0)


def test_samples_held_in_host_memory_give_the_same():
    model = mlp((5, 7, 3))
    found, again = (fine_tune(model, None, [retain], epochs=2, hold=hold, batch_size=5) for hold in ("device", "cpu"))
    assert literal.agree(found, literal.weights_of(again), 0)


def test_autocast_trains_in_bfloat16_with_weights_in_float32():
    types = []

    def forward(model, batch):
        logits = model(batch[0])
        types.append(logits.dtype)
        return logits

    model = mlp((5, 7, 3), dtype=torch.float32)
    data = [(retain[0].float(), retain[1])]
    found = fine_tune(model, None, data, epochs=1, autocast=True, forward=forward)
    assert types[-1] == torch.bfloat16
    assert found[0].weight.dtype == torch.float32
    assert not found[0].weight.equal(model[0].weight)


def test_training_works_where_gradients_are_off_and_leaves_no_gradient():
    model = mlp((5, 7, 3))
    with torch.no_grad():
        off = fine_tune(model, None, [retain], epochs=1)
    with torch.inference_mode():
        inside = fine_tune(model, None, [retain], epochs=1)
    assert literal.agree(off, literal.weights_of(inside), 0)
    assert not literal.agree(off, literal.weights_of(model), 0)
    assert all(parameter.grad is None for parameter in off.parameters())


def test_the_result_has_the_mode_of_the_model_in_every_part():
    model = cnn(dtype=torch.float32)
    model.bn2.train()
    images = [request((3, 6, 6), each=4, dtype=torch.float32)[1]]
    found = fine_tune(model, None, images, epochs=1)
    assert [module.training for module in found.modules()] == [module.training for module in model.modules()]
    assert found.bn1.num_batches_tracked == model.bn1.num_batches_tracked + 1


def test_dropout_follows_the_seed():
    model = nn.Sequential(mlp((5, 7, 3)), nn.Dropout(0.5)).eval()
    first, again, other = (fine_tune(model, None, [retain], epochs=1, seed=seed) for seed in (0, 0, 1))
    assert literal.agree(first, literal.weights_of(again), 0)
    assert not literal.agree(first, literal.weights_of(other), 0)


def test_frozen_weights_stay_and_a_frozen_model_is_refused():
    model = mlp((5, 7, 3))
    model[0].requires_grad_(False)
    assert fine_tune(model, None, [retain], epochs=1)[0].weight.equal(model[0].weight)
    with pytest.raises(BaselineError, match=r"requires_grad_\(True\)"):
        fine_tune(model.requires_grad_(False), None, [retain], epochs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": -1},
        {"epochs": 1.5},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"batch_size": 0},
        {"momentum": 2},
        {"weight_decay": -1},
        {"schedule": "linear"},
    ],
)
def test_an_option_out_of_range_is_named(options):
    (name,) = options
    with pytest.raises(BaselineError, match=f"{name}="):
        fine_tune(mlp((5, 7, 3)), None, [retain], **options)


def test_an_unknown_option_is_answered_with_near_names():
    with pytest.raises(BaselineError, match=r"'learning_rate'|'batchsize'.*'batch_size'"):
        Training.of({"batchsize": 3}, epochs=1, lr=0.1)
