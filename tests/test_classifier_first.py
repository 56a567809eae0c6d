"""A network whose classifier does not stand last: it is found by what the model returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unmerge
from networks import ready, request
from unmerge import Recipe, collect, fit
from unmerge.baselines import head_removal, logit_mask
from unmerge.errors import EditError, InitError, LayerError, UnmergeWarning
from unmerge.evaluation import outputs


class HeadFirst(nn.Module):
    def __init__(self, bias: bool = True, parametrized: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4, bias=bias)
        if parametrized:
            nn.utils.parametrizations.weight_norm(self.head)
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            inputs = torch.relu(layer(inputs))
        return self.head(inputs)


class WithSpareHead(nn.Module):
    """With a head for training alone, which stands last and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.ReLU())))
        self.head = nn.Linear(6, 4)
        self.spare = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


FORGET, RETAIN = ([pool] for pool in request((6,), each=12))


@pytest.mark.parametrize("memory", [None, "1GB"])
def test_its_rows_are_removed_and_the_last_quarter_is_that_of_the_others(memory):
    edit = fit(ready(HeadFirst()), FORGET, RETAIN, init="zero", memory=memory)
    assert list(edit.layers) == ["head", "third"]
    assert edit.head == "head"
    assert edit.removed == tuple(FORGET[0][1].unique().tolist())
    assert edit.provenance["choices"]["layers"].startswith("2 layers: the last quarter and the classifier")


@pytest.mark.filterwarnings("ignore:left out")
def test_where_only_the_classifier_is_left_of_the_last_quarter_that_is_told():
    with pytest.warns(UnmergeWarning, match=r"only the classifier 'head' is edited.*'spare.* never called"):
        assert list(fit(ready(WithSpareHead()), FORGET, RETAIN, init="zero").layers) == ["head"]
    recipe = Recipe(layers=["body.8", "head"])
    assert list(fit(ready(WithSpareHead()), FORGET, RETAIN, init="zero", recipe=recipe).layers) == ["body.8", "head"]


class WithUnusedStem(WithSpareHead):
    def __init__(self) -> None:
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self.stem = nn.Linear(6, 6)
        self._modules |= {name: module for name, module in modules.items() if name != "spare"}


@pytest.mark.filterwarnings("ignore:left out")
def test_where_statistics_are_of_the_classifier_what_else_is_left_out_is_no_reason():
    model = ready(WithUnusedStem())
    pools = [collect(model, pool, lambda name, _: name in ("stem", "head")) for pool in (FORGET, RETAIN)]
    assert list(fit(model, *pools, init="zero").layers) == ["head"]


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


@pytest.mark.filterwarnings("ignore:left out. 'head' has a parametrized weight")
@pytest.mark.parametrize("memory", [None, "1GB"])
def test_one_that_cannot_be_edited_is_left_out_and_named(memory, tmp_path):
    model = ready(HeadFirst(parametrized=True))
    edit = fit(model, FORGET, RETAIN, init="zero", memory=memory)
    assert list(edit.layers) == ["third"]
    assert edit.head is None
    assert "the classifier 'head' is not among the edited layers" in edit.provenance["choices"]["head"]
    for recipe in (Recipe(skip_layers=1), Recipe(skip_layers=1, head="keep")):
        edit = fit(model, FORGET, RETAIN, init="zero", recipe=recipe, memory=memory)
        assert list(edit.layers) == ["second", "third"]
    whole = collect(model, [*FORGET, *RETAIN])
    whole.save(tmp_path / "whole.safetensors")
    assert unmerge.Statistics.load(tmp_path / "whole.safetensors").head == "head"


def test_named_layers_do_not_make_another_layer_the_classifier():
    model = ready(HeadFirst())
    edit = fit(model, FORGET, RETAIN, init="zero", recipe=Recipe(layers=["second", "third"]))
    assert edit.head is None
    assert edit.removed == ()
    with pytest.raises(EditError, match="the classifier 'head' is not among the edited layers"):
        fit(model, FORGET, RETAIN, init="zero", recipe=Recipe(layers=["second", "third"], head="remove"))


def test_a_diagnosis_looks_at_the_same_layers():
    model = ready(HeadFirst())
    start = {name: 0.9 * value for name, value in model.state_dict().items() if not name.startswith("head")}
    with pytest.warns(UserWarning, match="init does not have head"):
        found = unmerge.diagnose(FORGET, RETAIN, model, start, recipe=Recipe(head="keep", skip_layers=0))
    assert [name for name, layer in found.layers.items() if layer.edited] == ["first", "second", "third"]


def test_labels_on_one_side_alone_and_several_parts_give_what_one_part_gives():
    model = ready(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 4)))
    inputs, labels = torch.randn(90, 64, dtype=torch.float64), torch.arange(90) % 4
    sides = [inputs[:30] + 1], [(inputs[30:], labels[30:])]
    recipe = Recipe(skip_layers=0, rank=4, retain_rank=4)
    whole = fit(model, *sides, init="zero", recipe=recipe, on_verdict="ignore")
    costs = unmerge.plan(model, recipe, data=sides[0], retain=sides[1]).groups[0].costs
    memory = int(1.02 * max(cost.bytes for cost in costs))
    in_parts = fit(model, *sides, init="zero", recipe=recipe, on_verdict="ignore", memory=memory)
    assert len(in_parts.provenance["plan"]["passes"]) > 1
    assert list(in_parts.layers) == list(whole.layers)


class Outspoken(nn.Linear):
    """Returns more than its output, as some layers of others do."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(hidden), None


class NoLayersOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.last = Outspoken(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.late(torch.relu(self.early(hidden=inputs)[0])))).log_softmax(1)


def test_layers_that_nobody_selected_may_do_what_they_like():
    edit = fit(ready(NoLayersOutput()), FORGET, RETAIN, init="zero", recipe=Recipe(skip_layers=1))
    assert list(edit.layers) == ["late", "last"]
    assert edit.removed == ()


def test_what_is_wrong_with_init_is_told_before_the_passes_also_where_the_classifier_is_kept():
    read = []

    class Watched(list):
        def __iter__(self):
            read.append(1)
            return super().__iter__()

    with pytest.raises(InitError, match="lacks"):
        fit(ready(HeadFirst()), Watched(FORGET), RETAIN, init={"nothing": torch.ones(2)}, recipe=Recipe(head="keep"))
    assert not read


def test_nothing_that_is_left_to_edit_is_told_with_a_bound_too():
    for memory in (None, "1GB"):
        with pytest.raises(LayerError, match=r"selects none.*Recipe\(head='edit'\)"):
            fit(
                ready(HeadFirst()),
                FORGET,
                RETAIN,
                init="zero",
                recipe=Recipe(layers=["head"], head="keep"),
                memory=memory,
            )


def test_classes_from_a_generator_serve_several_parts():
    model, recipe = ready(HeadFirst()), Recipe(skip_layers=0)
    whole = collect(model, [*FORGET, *RETAIN])
    costs = unmerge.plan(model, recipe, retain=whole).groups[0].costs
    memory = int(1.02 * max(cost.bytes for cost in costs))
    some = (label for label in (1,))
    edit = fit(model, classes=some, statistics=whole, init="zero", recipe=recipe, memory=memory)
    assert len(edit.provenance["plan"]["passes"]) > 1
    assert edit.removed == (1,)


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


def test_its_features_are_judged_and_its_rows_taken_out():
    model = ready(HeadFirst())
    splits = {"forget": FORGET, "retain": RETAIN}
    masked, removed = (method(model, FORGET, RETAIN) for method in (logit_mask, head_removal))
    for judged, layer in ((model, "head:input"), (removed, "head:input"), (masked, "model.head:input")):
        found = outputs(judged, splits)
        assert found.feature_layer == layer
        named = outputs(judged, splits, features=layer)
        assert torch.equal(found["forget"].features, named["forget"].features)
    spare = outputs(ready(WithSpareHead()), splits)
    assert spare.feature_layer == "head:input"
    forgotten = FORGET[0][1].unique()
    assert not torch.isin(removed(FORGET[0][0]).argmax(1), forgotten).any()
