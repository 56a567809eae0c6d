"""Where a constant shift goes, and which BatchNorms are re-estimated from what."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from networks import batched, cnn, hf_resnet, ready, request, resnet50_tree, samples
from unmerge import Edit, Recipe, collect, fit
from unmerge.editing.recalibration import RECALIBRATION_SAMPLES, recalibrate
from unmerge.errors import DataError, UnmergeWarning
from unmerge.model.evaluating import batch_norms, evaluating

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# ---- where a shift goes


class Wired(nn.Module):
    """A convolution "conv" and a BatchNorm "norm", wired as `mode` says, and a classifier."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=mode == "bias")
        self.twin = nn.Conv2d(3, 4, 1, bias=False)
        self.norm = nn.BatchNorm2d(4, track_running_stats=mode != "no statistics")
        self.other = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images)
        twin = self.other(self.twin(images))
        if self.mode == "residual":
            hidden = self.norm(hidden) + hidden
        elif self.mode == "two norms":
            hidden = self.norm(hidden) + self.other(hidden)
        elif self.mode == "norm shared by two":
            hidden = self.norm(hidden) + self.norm(twin)
        elif self.mode == "activation between":
            hidden = self.norm(torch.relu(hidden))
        elif self.mode == "read as a view":
            hidden = self.norm(hidden) + hidden.flatten(2).mean(2)[:, :, None, None]
        elif self.mode == "called twice":
            hidden = self.norm(hidden) + self.conv(images + 1)
        elif self.mode == "no norm":
            pass
        else:
            hidden = torch.relu(self.norm(hidden))
        return self.fc((hidden + twin).mean((2, 3)))


@pytest.mark.parametrize(
    ("mode", "target"),
    [
        ("alone", "norm.running_mean"),
        ("bias", "conv.bias"),
        ("residual", None),
        ("two norms", None),
        ("norm shared by two", None),
        ("activation between", None),
        ("read as a view", None),
        ("called twice", None),
        ("no norm", None),
        ("no statistics", None),
    ],
)
def test_a_shift_goes_to_the_bias_or_to_a_norm_that_alone_reads_the_output(mode, target):
    found = collect(ready(Wired(mode)), [samples((3, 5, 5), [0, 1, 1])])
    assert found.shift_to["conv"] == target
    assert found.shift_to["fc"] == "fc.bias"


@pytest.mark.parametrize(
    ("model", "size"), [(resnet50_tree(), 32), (hf_resnet(torch.float32), 32)], ids=["torchvision", "transformers"]
)
def test_every_convolution_of_a_resnet_has_its_own_norm(model, size):
    found = collect(model, [samples((3, size, size), [0, 1], torch.float32)])
    targets = [target for name, target in found.shift_to.items() if target is not None]
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert len(set(targets)) == len(targets) == len(found.layers)
    assert all(found.shift_to[name].endswith(".running_mean") for name in convolutions)


def test_a_shift_of_the_running_mean_keeps_the_mean_retain_response():
    """The edited convolution and its BatchNorm answer the mean retain row as before."""
    model = cnn()
    forget, retain = request((3, 6, 6), each=10)
    recipe = Recipe(layers=["conv1"], head="edit", mean="preserve")
    edit = fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert edit.layers["conv1"].shift_to == "bn1.running_mean"

    def mean_response() -> Tensor:
        return model.bn1(model.conv1(retain[0])).mean((0, 2, 3))

    before, other = mean_response(), model.bn1(model.conv1(forget[0])).mean((0, 2, 3))
    with edit.applied(model, alpha=1.0):
        assert_close(mean_response(), before)
        assert not torch.allclose(model.bn1(model.conv1(forget[0])).mean((0, 2, 3)), other, atol=1e-3)


# ---- recalibration


def data(count: int = 24, dtype: torch.dtype = torch.float64, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return batched(samples((3, 6, 6), [place % 3 + 1 for place in range(count)], dtype), size)


def edit_of(layers: list[str], model: nn.Module, **knobs: object) -> Edit:
    forget, retain = request((3, 6, 6), each=10, dtype=model.fc.weight.dtype)
    return fit(model, [forget], [retain], init="zero", recipe=Recipe(layers=layers, head="edit", **knobs))


def seen_by(model: nn.Module, norm: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    inputs: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch[0])
    hook.remove()
    return inputs


def test_statistics_become_the_cumulative_average_over_the_batches():
    model, batches = cnn(), data()
    model.bn1.num_batches_tracked += 500  # of training
    assert recalibrate(model, ["bn1"], batches, None) == 24
    inputs = seen_by(model, model.bn1, batches)
    assert_close(model.bn1.running_mean, torch.stack([one.mean((0, 2, 3)) for one in inputs]).mean(0))
    assert_close(model.bn1.running_var, torch.stack([one.var((0, 2, 3)) for one in inputs]).mean(0))
    assert model.bn1.num_batches_tracked == 3


@pytest.mark.parametrize(("layers", "behind"), [(["conv1"], ["bn1", "bn2"]), (["conv2"], ["bn2"]), (["fc"], [])])
def test_only_the_norms_behind_an_edited_layer_are_touched(layers, behind):
    model = cnn()
    edit, before = edit_of(layers, model, mean="free"), bits(model)
    with nullcontext() if behind else pytest.warns(UnmergeWarning, match="no BatchNorm lies behind"):
        edit.apply(model, 1.0, recalibrate=data())
    for name in ("bn1", "bn2"):
        same = [bits(model)[f"{name}.{part}"].equal(before[f"{name}.{part}"]) for part in STATISTICS]
        assert same == [name not in behind] * 3
    edit.revert(model)
    assert_close(bits(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", ["preserve", "free"])
def test_recalibration_is_reverted_bit_by_bit(dtype, mean):
    model = cnn(dtype=dtype).train()
    model.bn1.eval()
    edit, before = edit_of(["conv1", "conv2", "fc"], model, mean=mean), bits(model)
    flags = [module.training for module in model.modules()]
    edit.apply(model, 1.5, recalibrate=data(dtype=dtype))
    assert not bits(model)["bn2.running_var"].equal(before["bn2.running_var"])
    assert [module.training for module in model.modules()] == flags
    assert model.bn1.momentum == model.bn2.momentum == 0.1
    edit.revert(model)
    assert_close(bits(model), before, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == flags


def test_norms_are_estimated_with_the_edit_in_place():
    model, batches = cnn(), data()
    edit = edit_of(["conv1"], model, mean="free")
    edit.apply(model, 1.0, recalibrate=batches)
    inputs = seen_by(model, model.bn1, batches)
    assert_close(model.bn1.running_mean, torch.stack([one.mean((0, 2, 3)) for one in inputs]).mean(0))


def test_at_most_ten_thousand_samples_are_read():
    assert RECALIBRATION_SAMPLES == 10_000
    model, read = cnn(dtype=torch.float32), []
    batch = samples((3, 2, 2), [1, 2] * 1250, torch.float32)

    class Endless:
        def __iter__(self):
            while True:
                read.append(len(batch[0]))
                yield batch

    assert recalibrate(model, ["bn1"], Endless(), None) == 10_000
    assert sum(read) == 10_000
    assert model.bn1.num_batches_tracked == 4


@pytest.mark.parametrize("broken_at", [0, 1])
def test_an_exception_in_the_data_leaves_the_model_as_it_was(broken_at):
    class Broken:
        def __iter__(self):
            yield from data()[:broken_at]
            raise KeyError("disk gone")

    model = cnn().train()
    edit, before = edit_of(["conv1", "conv2", "fc"], model), bits(model)
    with pytest.raises(KeyError, match="disk gone"):
        edit.apply(model, 1.0, recalibrate=Broken())
    assert_close(bits(model), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())
    assert model.bn1.momentum == 0.1
    edit.apply(model, 1.0)  # it was not applied before


def test_batches_that_leave_no_finite_statistics_are_refused_and_nothing_changes():
    model = cnn()
    edit, before, bad = edit_of(["conv1", "conv2", "fc"], model), bits(model), data()
    bad[1][0][0, 0, 0, 0] = torch.inf
    with pytest.raises(DataError, match="'bn1'"):
        edit.apply(model, 1.0, recalibrate=bad)
    assert_close(bits(model), before, rtol=0, atol=0)


class Flat(nn.Module):
    """A BatchNorm of vectors behind a linear layer, called by keyword."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(torch.relu(self.norm(input=self.body(inputs))))


def test_a_last_batch_of_one_sample_does_not_count_where_there_are_larger_ones():
    forget, retain = request((6,), each=5)
    edit = fit(ready(Flat()), [forget], [retain], init="zero", recipe=Recipe(layers=["body"]))
    found = []
    for batches in (batched(retain, 7)[:2], [*batched(retain, 7)[:2], (retain[0][:1], retain[1][:1])]):
        model = edit.apply(ready(Flat()), 1.0, recalibrate=batches)
        found.append(model.norm.running_var.clone())
        assert model.norm.num_batches_tracked == 2
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_batches_of_one_sample_alone_are_counted_or_refused_in_plain_words():
    forget, retain = request((6,), each=5)
    model = ready(Flat())
    edit = fit(model, [forget], [retain], init="zero", recipe=Recipe(layers=["body"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DataError, match="a batch of one sample, in which a BatchNorm behind the edit sees one value"):
        edit.apply(model, 1.0, recalibrate=batched(retain, 1))
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    images = samples((3, 6, 6), [0, 1, 2, 3])
    model = cnn()
    assert recalibrate(model, ["bn1"], batched(images, 1), None) == 4
    assert model.bn1.num_batches_tracked == 4


def test_recalibration_takes_forward_and_mappings():
    one, other = cnn(), cnn()
    edit, batches = edit_of(["conv1", "conv2", "fc"], one), data()
    edit.apply(one, 1.0, recalibrate=batches)
    mappings = [{"x": inputs, "labels": labels} for inputs, labels in batches]
    edit.apply(other, 1.0, recalibrate=mappings, forward=lambda model, batch: model(batch["x"]))
    assert_close(bits(one), bits(other), rtol=0, atol=0)


def test_recalibration_draws_no_random_numbers_of_the_user():
    model = cnn(dtype=torch.float32)
    edit = edit_of(["conv1", "conv2", "fc"], model)
    inputs, labels = samples((3, 6, 6), [1, 2] * 8, torch.float32)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    edit.apply(model, 1.0, recalibrate=loader)
    assert torch.get_rng_state().equal(before)


def test_batch_norms_are_those_that_keep_statistics():
    model = nn.ModuleDict(
        {"a": nn.BatchNorm1d(2), "b": nn.BatchNorm2d(2, track_running_stats=False), "c": nn.GroupNorm(1, 2)}
    )
    assert list(batch_norms(model)) == ["a"]


def test_evaluating_restores_flags_and_random_state_after_an_exception():
    model = cnn().train()
    model.bn1.eval()
    before, flags = torch.get_rng_state(), [module.training for module in model.modules()]

    def broken() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert [module.training for module in model.modules()] == flags
    assert torch.get_rng_state().equal(before)
    assert torch.is_grad_enabled()
