"""Wrong input is answered with a clear error that names it, and changes nothing."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import unmerge
from networks import cnn, mlp, request, samples
from unmerge import Recipe, collect, fit
from unmerge.errors import (
    DataError,
    FileError,
    InitError,
    LayerError,
    RecipeError,
    StatisticsError,
    UnmergeError,
)

FORGET, RETAIN = ([part] for part in request((6,)))
ALL = Recipe(skip_layers=0)


def asking(**changes: Any) -> Callable[[nn.Module], object]:
    """A request with some of its arguments replaced."""
    arguments = {"forget": FORGET, "retain": RETAIN, "init": "zero", "recipe": ALL, **changes}
    return lambda model: fit(model, **arguments)


def missing_keys(model: nn.Module) -> object:
    state = {name: tensor + 1 for name, tensor in model.state_dict().items() if not name.startswith(("0.", "4."))}
    return fit(model, FORGET, RETAIN, init=state, recipe=ALL)


def own_weights(model: nn.Module) -> object:
    return fit(model, FORGET, RETAIN, init=model, recipe=ALL)


def different_layers(model: nn.Module) -> object:
    return fit(model, collect(model, FORGET, ["0", "2"]), collect(model, RETAIN), init="zero", recipe=ALL)


def statistics_without_full_classes(model: nn.Module) -> object:
    recipe = ALL.but(basis="cav-class")
    return fit(model, collect(model, FORGET), collect(model, RETAIN), init="zero", recipe=recipe)


def statistics_without_sample(model: nn.Module) -> object:
    recipe = ALL.but(basis="cav-kmeans")
    return fit(model, collect(model, FORGET), collect(model, RETAIN), init="zero", recipe=recipe)


def statistics_with_limited_points(model: nn.Module) -> object:
    recipe = ALL.but(basis="cav-class", max_points=100)
    return fit(model, collect(model, FORGET, per_class="full"), RETAIN, init="zero", recipe=recipe)


def of_classes(classes: Any, labelled: bool = True, **knobs: Any) -> Callable[[nn.Module], object]:
    def ask(model: nn.Module) -> object:
        data = FORGET + RETAIN if labelled else [FORGET[0][0], RETAIN[0][0]]
        everything = collect(model, data, per_class="full", sample=8)
        return fit(model, classes=classes, statistics=everything, init="zero", recipe=ALL.but(**knobs))

    return ask


def both_kinds(model: nn.Module) -> object:
    return fit(model, FORGET, RETAIN, classes=[0], statistics=collect(model, FORGET + RETAIN), init="zero")


def not_finite(value: float) -> list[Any]:
    inputs, labels = FORGET[0]
    inputs = inputs.clone()
    inputs[0, 0] = value
    return [(inputs, labels)]


def one_shot() -> object:
    return (batch for batch in RETAIN)


LIMITED = ALL.but(basis="cav-class", max_points=100)
TENSOR, MAPPING = FORGET[0][0], {"input": FORGET[0][0], "labels": FORGET[0][1]}

WRONG: dict[str, tuple[type[UnmergeError], str, Callable[[nn.Module], object]]] = {
    "an empty forget loader": (DataError, "forget: the data gave no batch", asking(forget=[])),
    "an empty retain loader": (DataError, "retain: the data gave no batch", asking(retain=[])),
    "an empty data set": (
        DataError,
        "no batch",
        asking(forget=DataLoader(TensorDataset(torch.zeros(0, 6)), batch_size=4)),
    ),
    "an iterator that was read": (DataError, "read before is empty", asking(forget=iter([]))),
    "a tensor as data": (DataError, r"forget: .* got Tensor.*\[batch\]", asking(forget=TENSOR)),
    "a mapping as data": (DataError, r"retain: .* got dict.*\[batch\]", asking(retain=MAPPING)),
    "a string as data": (DataError, "got str", asking(forget="cifar10")),
    "a Dataset as data": (DataError, "Wrap a Dataset in a DataLoader", asking(forget=TensorDataset(TENSOR))),
    "another order of arguments": (
        LayerError,
        "the model is a list; expected an nn.Module",
        lambda model: fit(FORGET, model, RETAIN, init="zero"),
    ),
    "another order for a diagnosis": (
        LayerError,
        "the model is a list",
        lambda model: unmerge.diagnose(model, FORGET, RETAIN),
    ),
    "a number as data": (DataError, "got int", asking(retain=3)),
    "no forget": (DataError, "forget and retain", asking(forget=None)),
    "no retain": (DataError, "forget and retain", asking(retain=None)),
    "batches of text": (DataError, "no input tensor", asking(forget=[("a", "b")])),
    "labels in some batches": (DataError, "some batches have class labels", asking(forget=[*FORGET, TENSOR])),
    "cav-class without labels": (DataError, "class label", asking(forget=[TENSOR], recipe=ALL.but(basis="cav-class"))),
    "private-mean without labels": (
        DataError,
        "class label",
        asking(retain=[RETAIN[0][0]], recipe=ALL.but(basis="private-mean")),
    ),
    "NaN at the start": (DataError, "layer '0' received NaN", asking(forget=not_finite(torch.nan))),
    "infinity at the start": (DataError, "layer '0' received NaN or infinite", asking(forget=not_finite(torch.inf))),
    "NaN later on": (DataError, "layer '0' received NaN", asking(retain=[*RETAIN, *not_finite(torch.nan)])),
    "init of other shapes": (
        InitError,
        r"0\.weight is \(9, 6\).*; 2\.weight is \(7, 9\)",
        asking(init=mlp((6, 9, 7, 4))),
    ),
    "init with missing keys": (InitError, r"lacks 2 of the 3 .*0\.weight, 4\.weight", missing_keys),
    "init with the model's weights": (InitError, "same weights as the model", own_weights),
    "init that is no checkpoint": (InitError, "NoneType", asking(init=None)),
    "init that is not there": (FileError, "pretrained.*'zero'", asking(init="pretrained")),
    "different layers": (StatisticsError, "different layers: 4", different_layers),
    "a one-shot retain with max_points": (
        DataError,
        "retain is a one-shot iterator.*max_points",
        asking(retain=one_shot(), recipe=LIMITED),
    ),
    "a one-shot forget with max_points": (
        DataError,
        "forget is a one-shot iterator.*max_points",
        asking(forget=one_shot(), recipe=LIMITED),
    ),
    "statistics with max_points": (DataError, "max_points", statistics_with_limited_points),
    "statistics without full classes": (DataError, "per_class='full'", statistics_without_full_classes),
    "statistics without a sample": (DataError, "sample=", statistics_without_sample),
    "classes beside forget": (DataError, "in place of forget and retain", both_kinds),
    "classes without statistics": (DataError, "go together", asking(forget=None, retain=None, classes=[0])),
    "unknown classes": (StatisticsError, r"classes=\[9\].*\[0, 1, 2\]", of_classes([9])),
    "a number as classes": (DataError, r"classes=3.0 is not a list of labels", of_classes(3.0)),
    "no classes": (DataError, r"classes=\[\] is not a list of labels", of_classes([])),
    "truth values as classes": (DataError, "not a list of labels", of_classes([True])),
    "every class": (StatisticsError, "every class", of_classes([0, 1, 2])),
    "classes of unlabelled statistics": (StatisticsError, "without labels", of_classes([0], labelled=False)),
    "pca from classes": (DataError, "'lda' or 'private-mean'", of_classes([0], basis="pca")),
    "contrastive from classes": (DataError, "'lda' or 'private-mean'", of_classes([0], basis="contrastive")),
    "cav-class from classes": (DataError, "'lda' or 'private-mean'", of_classes([0], basis="cav-class")),
    "cav-kmeans from classes": (DataError, "'lda' or 'private-mean'", of_classes([0], basis="cav-kmeans")),
    "an unknown layer": (LayerError, "'22'.*'2'", asking(recipe=Recipe(layers=["22"]))),
    "an unknown basis": (RecipeError, "'cav-class'", lambda model: Recipe(basis="cav-clas")),
    "an unknown field": (RecipeError, "'rank'", lambda model: Recipe(rnk=3)),
    "a mapping as recipe": (DataError, "recipe is a dict; expected a Recipe", asking(recipe={"rank": 3})),
    "a mapping as recipe of a plan": (DataError, "recipe is a dict", lambda model: unmerge.plan(model, {"rank": 3})),
    "a mapping as recipe of a diagnosis": (
        DataError,
        "recipe is a dict",
        lambda model: unmerge.diagnose(FORGET, RETAIN, model, recipe={"rank": 3}),
    ),
    "a plan of data that can be read once": (
        DataError,
        "data is a one-shot iterator",
        lambda model: unmerge.plan(model, data=iter(FORGET)),
    ),
    "the accuracy on no sample": (
        DataError,
        "hold no sample",
        lambda model: unmerge.measures.accuracy(model, [(TENSOR[:0], torch.zeros(0, dtype=torch.int64))]),
    ),
    "a negative lam": (RecipeError, "lam=-1", lambda model: Recipe(lam=-1)),
    "a mask that is not in the batch": (DataError, "mask='valid'", asking(mask="valid")),
}


@pytest.mark.parametrize("kind", WRONG)
def test_it_is_refused_by_name_and_the_model_is_as_before(kind):
    error, message, ask = WRONG[kind]
    model = mlp().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(error) as refused:
        ask(model)
    assert type(refused.value) is error
    assert re.search(message, str(refused.value), re.DOTALL)
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.get_rng_state().equal(random)


@pytest.mark.parametrize("kind", ["tensor", "mapping", "empty", "empty loader", "one-shot"])
def test_wrong_recalibration_data_is_refused_and_the_model_is_as_before(kind):
    model = cnn()
    forget, retain = request((3, 6, 6))
    edit = fit(model, [forget], [retain], init="zero", recipe=ALL)
    data, message = {
        "tensor": (retain[0], "recalibrate: .* got Tensor"),
        "mapping": ({"input": retain[0]}, "recalibrate: .* got dict"),
        "empty": ([], "recalibrate: the data gave no batch"),
        "empty loader": (DataLoader(TensorDataset(torch.zeros(0, 3, 6, 6))), "recalibrate: the data gave no batch"),
        "one-shot": (iter([retain]), "recalibrate is a one-shot iterator"),
    }[kind]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DataError, match=message):
        edit.apply(model, 1.0, recalibrate=data)
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    edit.apply(model, 1.0)  # the edit is not carried


def test_a_pickled_init_is_refused_and_nothing_in_it_runs(tmp_path):
    payload = b"cbuiltins\nexec\n(S'raise SystemExit'\ntR."
    with pytest.raises(SystemExit):
        pickle.loads(payload)
    for name in ("init.pkl", "init.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(payload)
        with pytest.raises(FileError, match=name):
            asking(init=tmp_path / name)(mlp())
    with pytest.raises(FileError, match=r"pytorch_model\.bin"):
        asking(init=tmp_path)(mlp())


def test_a_damaged_init_checkpoint_is_a_file_error(tmp_path):
    for name in ("init.safetensors", "init.pt"):
        (tmp_path / name).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
        with pytest.raises(FileError, match=name):
            asking(init=tmp_path / name)(mlp())


def test_an_exception_of_the_users_data_or_forward_passes_through_unchanged():
    class OwnError(Exception):
        pass

    def data():
        yield FORGET[0]
        raise OwnError("disk gone")

    def forward(model, batch):
        raise OwnError("model broke")

    with pytest.raises(OwnError, match="disk gone"):
        asking(forget=data())(mlp())
    with pytest.raises(OwnError, match="model broke"):
        asking(forward=forward)(mlp())


def test_a_one_shot_generator_is_enough_where_data_is_read_once():
    model = mlp()
    found = fit(model, iter(FORGET), iter(RETAIN), init="zero", recipe=ALL)
    expected = fit(model, FORGET, RETAIN, init="zero", recipe=ALL)
    for name, layer in found.layers.items():
        assert layer.B.equal(expected.layers[name].B)


def test_every_error_is_a_value_error_of_ours():
    for name in ("RecipeError", "LayerError", "DataError", "StatisticsError", "InitError", "EditError", "FileError"):
        kind = getattr(unmerge.errors, name)
        assert issubclass(kind, UnmergeError)
        assert issubclass(kind, ValueError)


def test_labels_of_tokens_are_no_class_labels():
    """A language model's labels have one entry a token; they make no class request."""
    inputs, labels = samples((6,), [0, 1, 2, 1])
    found = collect(mlp(), [(inputs, labels.unsqueeze(1).repeat(1, 3))])
    assert found.classes == ()


def without_a_layer() -> dict[str, torch.Tensor]:
    return {name: value for name, value in mlp(seed=1).state_dict().items() if not name.startswith("2.")}


BAD_STARTS: dict[str, tuple[Any, str]] = {
    "other names": (without_a_layer(), r"lacks 1 of the 3 edited parameters: 2\.weight\..*layers=\.\.\."),
    "other shapes": (mlp((6, 9, 7, 4)), "init has other shapes: "),
    "no file": ("gone.safetensors", "init='gone.safetensors' is neither"),
    "another training": (mlp(seed=1), "does not look like the checkpoint"),
}


@pytest.mark.parametrize("known", [False, True], ids=["data", "with statistics of retain"])
@pytest.mark.parametrize("memory", [None, "1GB"])
@pytest.mark.parametrize("start", BAD_STARTS)
def test_a_wrong_init_is_told_before_the_model_is_called(start: str, memory: str | None, known: bool) -> None:
    model = mlp()
    retain: Any = collect(model, RETAIN) if known else RETAIN
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    init, message = BAD_STARTS[start]
    with pytest.raises(UnmergeError, match=message):
        fit(model, FORGET, retain, init=init, recipe=ALL, memory=memory)
    assert not calls
    if start != "another training" and not known:  # which a diagnosis only warns of
        with pytest.raises(UnmergeError, match=message):
            unmerge.diagnose(FORGET, retain, model, init=init)
        assert not calls


def test_an_init_without_the_classifier_will_do_where_that_is_kept() -> None:
    state = {name: value * 0.9 for name, value in mlp().state_dict().items() if not name.startswith("4.")}
    assert list(fit(mlp(), FORGET, RETAIN, init=state, recipe=ALL.but(head="keep")).layers) == ["0", "2"]
