"""Relearning: the literal steps, a model left alone, and a removed row that is given back."""

import copy

import pytest
import torch
from torch import nn

from networks import batched, cnn, mlp, request
from unmerge.baselines import LogitMask
from unmerge.evaluation import evaluate
from unmerge.evaluation.predictions import Outputs
from unmerge.evaluation.relearning import compare, observe, pooled, relearn
from unmerge.evaluation.subject import NotMeasurable, Setting, Subject


def test_equals_plain_steps_on_the_whole_set() -> None:
    forget, _ = request((6,), each=12)
    model = mlp()
    curve = relearn(model, forget, steps=(0, 2, 3), rate=0.1, batch_size=1000)
    assert list(curve) == [0, 2, 3]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step in curve:
            assert torch.equal(curve[step], plain(forget[0]).argmax(1) == forget[1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(forget[0]).float(), forget[1]).backward()
        optimizer.step()


def test_model_and_random_state_are_left_alone() -> None:
    forget, _ = request((3, 6, 6), each=10)
    model = cnn().train().requires_grad_(False)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    relearn(model, forget, steps=(0, 3), batch_size=4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_removed_row_comes_back() -> None:
    forget, _ = request((6,), each=12)
    model = mlp()
    with torch.no_grad():
        model[-1].weight[0] = 0
        model[-1].bias[0] = -1e4
    curve = relearn(model, forget, steps=(0, 60), rate=0.1)
    assert curve[60].all()


def test_mappings_and_class_ordered_batches_are_pooled() -> None:
    (inputs, labels), _ = request((6,), forgotten=(0, 3), each=6)
    mapping = [{"input": inputs[rows], "labels": labels[rows]} for rows in torch.arange(12).split(5)]
    whole = pooled(mapping)
    assert torch.equal(whole["input"], inputs)
    assert torch.equal(whole["labels"], labels)
    forward = lambda model, batch: model(batch["input"])  # noqa: E731
    first = relearn(mlp(), whole, steps=(0, 4), batch_size=4, forward=forward)
    second = relearn(mlp(), pooled(batched((inputs, labels), 5)), steps=(0, 4), batch_size=4)
    assert torch.equal(first[4], second[4])


def test_observe_and_compare() -> None:
    forget, _ = request((6,), each=40)
    setting = Setting(splits={"forget": batched(forget, 16)})
    own, retrained = (Subject("m", Outputs({}), mlp(seed=seed)) for seed in (0, 1))
    seen, reference = (observe(each, setting, steps=(0, 1, 5), rate=0.1, max_samples=25) for each in (own, retrained))
    assert len(seen[5]) == 25
    row = {c.label: f for c, f in compare(seen, reference, setting).rows["relearning"].items()}
    gaps = [abs(seen[step].double().mean() - reference[step].double().mean()).item() for step in (0, 1, 5)]
    assert row["mean gap"].value == pytest.approx(sum(gaps) / 3)
    assert row["after 5"].value == pytest.approx(seen[5].double().mean().item())
    assert "reference" in compare(seen, None, setting).missing["mean gap"]


def test_what_it_needs() -> None:
    with pytest.raises(NotMeasurable, match="only outputs"):
        observe(Subject("m", Outputs({})), Setting())
    with pytest.raises(NotMeasurable, match="forget split"):
        observe(Subject("m", Outputs({}), mlp()), Setting())
    with pytest.raises(NotMeasurable, match="different shapes"):
        pooled([(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))])


def test_a_mask_outside_the_network_is_named_instead_of_measured() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).eval()
    data = [(torch.randn(20, 4), torch.zeros(20, dtype=torch.int64))]
    splits = {"forget": data, "retain": [(torch.randn(20, 4), torch.arange(20) % 2 + 1)]}
    masked = LogitMask(model, [0])
    found = evaluate({"mask": masked, "plain": model}, None, splits, ["relearning"])
    assert "plain" in found["relearning"].cells
    assert "mask" not in found["relearning"].cells
    assert any("mask outside the network" in reason for reason in found.missing.values())
