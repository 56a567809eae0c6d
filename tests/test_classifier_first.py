"""A network whose classifier does not stand last: it is found by what the model returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unmerge
from networks import ready, request
from unmerge import Recipe, collect, fit
from unmerge.errors import EditError


class HeadFirst(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4, bias=bias)
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            inputs = torch.relu(layer(inputs))
        return self.head(inputs)


FORGET, RETAIN = ([pool] for pool in request((6,), each=12))


@pytest.mark.parametrize("memory", [None, "1GB"])
def test_its_rows_are_removed_and_the_last_quarter_is_that_of_the_others(memory):
    edit = fit(ready(HeadFirst()), FORGET, RETAIN, init="zero", memory=memory)
    assert list(edit.layers) == ["head", "third"]
    assert edit.head == "head"
    assert edit.removed == tuple(FORGET[0][1].unique().tolist())
    assert edit.provenance["choices"]["layers"].startswith("2 layers: the last quarter and the classifier")


def test_statistics_of_everything_give_the_same_layers():
    model = ready(HeadFirst())
    whole = collect(model, [*FORGET, *RETAIN])
    classes = FORGET[0][1].unique().tolist()
    edit = fit(model, classes=classes, statistics=whole, init="zero")
    assert (list(edit.layers), edit.head, list(edit.removed)) == (["head", "third"], "head", classes)


@pytest.mark.parametrize("memory", [None, "1GB"])
def test_it_can_be_kept_and_init_need_not_have_it(memory):
    model = ready(HeadFirst())
    start = {name: 0.9 * value for name, value in model.state_dict().items() if not name.startswith("head")}
    for init in ("zero", start):
        edit = fit(model, FORGET, RETAIN, init=init, recipe=Recipe(head="keep", skip_layers=0), memory=memory)
        assert list(edit.layers) == ["first", "second", "third"]
        assert edit.head is None


def test_rows_that_cannot_be_removed_are_refused_before_anything_is_solved(monkeypatch):
    monkeypatch.setattr("unmerge.pipeline.fit_layers", lambda *_: pytest.fail("solved"))
    with pytest.raises(EditError, match=r"head='remove' cannot be done: the classifier 'head' has no bias"):
        fit(ready(HeadFirst(bias=False)), FORGET, RETAIN, init="zero", recipe=Recipe(head="remove"))


def test_a_bound_on_memory_draws_no_random_numbers_of_the_user():
    data = torch.utils.data.TensorDataset(*RETAIN[0])
    loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    model = ready(HeadFirst())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fit(model, FORGET, loader, init="zero", memory="1GB")
    unmerge.plan(model, data=FORGET, retain=loader)
    assert torch.get_rng_state().equal(before)
