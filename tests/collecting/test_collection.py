"""collect(): the statistics are those of a dense computation, and the model is left as it was found."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from test_unfolding import SamePadding
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from networks import (
    CONVOLUTIONS,
    batched,
    cnn,
    conv1d_net,
    convolution_net,
    hf_resnet,
    hf_vit,
    mlp,
    ready,
    resnet50_tree,
    samples,
)
from unmerge import Moments, collect
from unmerge.collecting.unfolding import rows
from unmerge.errors import DataError, LayerError, StatisticsError, UnmergeWarning


def received(model: nn.Module, names: Iterable[str], batches: Iterable[Any]) -> dict[str, list[Tensor]]:
    """Every input of the layers, seen by hooks of the test's own."""
    inputs: dict[str, list[Tensor]] = defaultdict(list)
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0]))
        for name in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch[0])
    for hook in hooks:
        hook.remove()
    return inputs


def flat_rows(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([rows(module, one).flatten(-3, -2) for one in inputs], dim=-2)


def assert_same(found: Moments, expected: Moments) -> None:
    assert found.n == expected.n
    assert_close(found.mean, expected.mean)
    assert_close(found.scatter, expected.scatter)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "cnn": (cnn, (3, 6, 6)),
    "conv1d": (conv1d_net, (6,)),
    "vit": (hf_vit, (3, 8, 8)),
    "resnet": (hf_resnet, (3, 32, 32)),
    **{f"conv-{kind}": (lambda kind=kind: convolution_net(kind), (4, 6, 7)) for kind in CONVOLUTIONS},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("per_class", ["means", "full"])
def test_moments_and_class_sums_are_those_of_a_dense_computation(kind, per_class):
    make, shape = MODELS[kind]
    model = make()
    data = samples(shape, [7, 2, 2, 5, 7, 2, 7])
    found = collect(model, batched(data, 3), per_class=per_class)
    assert found.samples == 7
    assert (found.classes, found.class_samples) == ((2, 5, 7), (3, 1, 3))
    inputs = received(model, found.layers, [data])
    for name, layer in found.layers.items():
        module = model.get_submodule(name)
        by_sample = rows(module, inputs[name][0])
        assert_same(layer.moments, Moments.of(by_sample.flatten(-3, -2)))
        for place, label in enumerate(found.classes):
            own = by_sample[..., data[1] == label, :, :].flatten(-3, -2)
            assert layer.class_rows[place] == own.shape[-2]
            assert_close(layer.class_sums[place], own.sum(-2))
            if per_class == "full":
                assert_same(layer.class_moments[place], Moments.of(own))


def test_real_digits_in_float32_agree_with_a_dense_float64_computation():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=500)
    model = cnn(channels=1, classes=10, dtype=torch.float32)
    found = collect(model, loader)
    inputs = received(model, found.layers, loader)
    for name, layer in found.layers.items():
        expected = Moments.of(flat_rows(model.get_submodule(name), inputs[name]).double())
        assert layer.moments.n == expected.n
        assert_close(layer.moments.mean, expected.mean, rtol=1e-5, atol=1e-5)
        size = float(expected.scatter.abs().max())
        assert_close(layer.moments.scatter.double(), expected.scatter, rtol=0, atol=1e-5 * size)


# ---- the model is left as found


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def hooks_of(model: nn.Module) -> list[list[object]]:
    return [
        list(hooks.values())
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]


class OwnError(Exception):
    """Not ours: what the user's data or model raises."""


def breaking(batches: Sequence[Any], after: int) -> Iterable[Any]:
    yield from batches[:after]
    raise OwnError("disk gone")


@pytest.mark.parametrize("end", ["well", "data raises at once", "data raises", "model raises", "refused"])
def test_the_model_is_as_before_whatever_happens(end):
    model = nn.Sequential(cnn(dtype=torch.float32), nn.Dropout(0.5))
    model.train()
    model[0].bn2.eval()  # one frozen BatchNorm
    model[0].conv1.weight.requires_grad_(False)
    calls = []
    model[0].bn1.register_forward_hook(lambda *_: calls.append(1))
    loader = DataLoader(TensorDataset(*samples((3, 6, 6), [0, 1] * 6, torch.float32)), batch_size=4, shuffle=True)
    batches, options = list(loader), {}
    data: Iterable[Any] = loader
    if end == "data raises at once":
        data = breaking(batches, 0)
    elif end == "data raises":
        data = breaking(batches, 2)
    elif end == "model raises":

        def forward(model, batch):
            model(batch[0])
            raise OwnError("model broke")

        options["forward"] = forward
    elif end == "refused":
        data = [batches[0], batches[1][0]]  # labels, then none

    state, flags = bits(model), [module.training for module in model.modules()]
    hooks, random, grads = hooks_of(model), torch.get_rng_state(), [p.requires_grad for p in model.parameters()]
    if end == "well":
        collect(model, data)
        assert calls
    elif end == "refused":
        with pytest.raises(DataError, match="some batches have class labels"):
            collect(model, data)
    else:
        with pytest.raises(OwnError):
            collect(model, data, **options)
    assert_close(bits(model), state, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == flags
    assert hooks_of(model) == hooks
    assert torch.get_rng_state().equal(random)
    assert [p.requires_grad for p in model.parameters()] == grads
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


def test_a_model_in_training_mode_is_read_in_evaluation_mode():
    model = nn.Sequential(nn.Dropout(0.9), mlp(), nn.Dropout(0.9))
    data = batched(samples((6,), [0, 1, 2, 1]), 2)
    expected = collect(model, data)
    found = collect(model.train(), data)
    for name, layer in found.layers.items():
        assert_same(layer.moments, expected.layers[name].moments)


# ---- how batches are given


def test_tensors_tuples_mappings_and_forward_give_the_same_moments():
    model, (inputs, labels) = hf_vit(), samples((3, 8, 8), [0, 1, 2, 1])
    ways = [
        collect(model, [(inputs, labels)]),
        collect(model, [inputs]),
        collect(model, [{"pixel_values": inputs, "labels": labels}]),
        collect(model, [[inputs, {"more": labels}]]),
        collect(
            model,
            [{"image": inputs, "labels": labels}],
            forward=lambda model, batch: model(pixel_values=batch["image"]),
        ),
    ]
    assert [way.classes for way in ways] == [(0, 1, 2), (), (0, 1, 2), (), (0, 1, 2)]
    for way in ways[1:]:
        assert way.layers.keys() == ways[0].layers.keys()
        for name, layer in way.layers.items():
            assert_same(layer.moments, ways[0].layers[name].moments)


def test_the_data_is_fed_once_after_a_few_samples_that_are_looked_at():
    model, sizes = mlp(), []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    collect(model, batched(samples((6,), [0, 1] * 20), 15))
    assert sizes == [2, 15, 15, 10]


def test_a_one_shot_generator_is_enough_for_one_pass():
    data = batched(samples((6,), [0, 1, 2, 1]), 2)
    model = mlp()
    assert_same(collect(model, iter(data))["0"].moments, collect(model, data)["0"].moments)


def test_inputs_that_were_made_in_inference_mode_are_read_like_others():
    model, (inputs, labels) = mlp(), samples((6,), [0, 1, 2, 1])
    expected = collect(model, [(inputs, labels)])
    with torch.inference_mode():
        frozen = inputs.clone()
        inside = collect(model, [(inputs, labels)])
    for found in (collect(model, [(frozen, labels)]), inside):
        assert_same(found["4"].moments, expected["4"].moments)


def test_autocast_does_not_round_the_statistics():
    model, data = mlp(dtype=torch.float32), [samples((6,), [0, 1] * 50, torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        found = collect(model, data)
    assert found["0"].moments.scatter.dtype == torch.float32
    assert_same(found["0"].moments, collect(model, data)["0"].moments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_read(dtype):
    model, data = cnn(dtype=dtype), [samples((3, 6, 6), [0, 1] * 8, dtype)]
    found = collect(model, data)
    inputs = received(model, found.layers, data)
    for name, layer in found.layers.items():
        expected = Moments.of(flat_rows(model.get_submodule(name), inputs[name]).double())
        assert layer.moments.n == expected.n
        size = float(expected.scatter.abs().max())
        assert_close(layer.moments.scatter.double(), expected.scatter, rtol=0, atol=1e-2 * size)


@pytest.mark.parametrize("per_class", ["means", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batches_of_one_sample_are_read_without_a_warning(dtype, per_class):
    model, data = cnn(dtype=dtype), batched(samples((3, 1, 1), [0, 1, 0], dtype), 1)
    assert collect(model, data, per_class=per_class).samples == 3


# ---- a second pass through the same weights

AGAIN = {**MODELS, "resnet50": (lambda: resnet50_tree(dtype=torch.float64), (3, 32, 32))}


@pytest.mark.parametrize("kind", AGAIN)
def test_a_pass_over_the_layers_of_earlier_statistics_equals_a_pass_of_its_own(kind):
    make, shape = AGAIN[kind]
    model = make()
    first = collect(model, [samples(shape, [0, 1, 1])])
    data = [samples(shape, [2, 0, 1, 2], seed=1)]
    found, named, expected = collect(model, data, first), collect(model, data, first.layers), collect(model, data)
    assert (found.head, found.shift_to) == (expected.head, expected.shift_to)
    for name, layer in expected.layers.items():
        assert_same(found[name].moments, layer.moments)
        assert_same(named[name].moments, layer.moments)
        assert_close(found[name].class_sums, layer.class_sums)


def test_layers_of_statistics_of_other_weights_are_refused():
    model, data = mlp(), [samples((6,), [0, 1, 1])]
    first = collect(model, data)
    with torch.no_grad():
        model[2].bias += 1
    with pytest.raises(StatisticsError, match=r"'2\.bias' differs"):
        collect(model, data, first)


# ---- padding


def bert(seed: int = 0) -> nn.Module:
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=12,
        num_labels=3,
    )
    return ready(BertForSequenceClassification(config), torch.float64, seed)


def sentences() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 20, (length,), generator=generator) for length in (5, 9, 2, 7, 1, 4)]
    return texts, torch.tensor([0, 1, 2, 1, 0, 2])


def padded(texts: Sequence[Tensor], labels: Tensor, length: int) -> dict[str, Tensor]:
    ids, mask = torch.zeros(2, len(texts), length, dtype=torch.long)
    for place, text in enumerate(texts):
        ids[place, : len(text)] = text
        mask[place, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("per_class", ["means", "full"])
def test_a_padded_batch_equals_unpadded_ones(per_class):
    texts, labels = sentences()
    model = bert()
    together = collect(model, [padded(texts, labels, length=12)], per_class=per_class)
    alone = collect(
        model,
        [padded([text], labels[place : place + 1], len(text)) for place, text in enumerate(texts)],
        per_class=per_class,
    )
    assert together.layers.keys() == alone.layers.keys()
    assert together["bert.encoder.layer.0.attention.self.query"].moments.n == sum(map(len, texts))
    assert together["classifier"].moments.n == len(texts)
    for name, layer in together.layers.items():
        assert_same(layer.moments, alone[name].moments)
        assert_close(layer.class_rows, alone[name].class_rows)
        assert_close(layer.class_sums, alone[name].class_sums)
        for place, moments in layer.class_moments.items():
            assert_same(moments, alone[name].class_moments[place])


def test_a_mask_may_be_a_function_or_an_entry_and_none_counts_padding():
    model, batch = bert(), padded(*sentences(), length=12)
    named = {**batch, "valid": batch["attention_mask"]}
    expected = collect(model, [batch])
    for found in (
        collect(model, [named], mask="valid", forward=lambda model, b: model(b["input_ids"], b["attention_mask"])),
        collect(model, [batch], mask=lambda batch: batch["input_ids"] > 0),
    ):
        assert_same(found["classifier"].moments, expected["classifier"].moments)
        assert_same(
            found["bert.encoder.layer.1.output.dense"].moments,
            expected["bert.encoder.layer.1.output.dense"].moments,
        )
    everything = collect(model, [batch], mask=lambda batch: torch.ones_like(batch["input_ids"]))
    assert everything["bert.encoder.layer.0.output.dense"].moments.n == batch["attention_mask"].sum()


# ---- layers that share their input, or are called more than once


def test_layers_that_receive_the_same_tensor_share_one_value():
    layers = collect(hf_vit(), [samples((3, 8, 8), [0, 1, 2])]).layers
    first, second = ([name for name in layers if f".{place}.attention" in name] for place in (0, 1))
    assert len({id(layers[name]) for name in first}) == 2  # query, key and value; and the output
    assert len({id(layers[name]) for name in second}) == 2
    assert len({id(layer) for layer in layers.values()}) == len(layers) - 4


class Twice(nn.Module):
    """A layer that is called twice in every pass, on different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(torch.relu(self.layer(inputs)))))


def test_a_module_that_is_called_several_times_counts_all_calls():
    model, data = ready(Twice()), batched(samples((6,), [0, 1, 1, 0, 1]), 2)
    found = collect(model, data)
    inputs = received(model, ["layer"], data)["layer"]
    assert len(inputs) == 6
    assert_same(found["layer"].moments, Moments.of(torch.cat(inputs)))
    assert found["layer"].class_rows.tolist() == [4, 6]
    assert found["head"].moments.n == 5


class Diverging(nn.Module):
    """Two layers that read one tensor for small batches and other things for large ones."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)
        self.mode = mode

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.first(inputs)
        if len(inputs) <= 2:
            return output + self.second(inputs)
        if self.mode == "another tensor":
            return output + self.second(inputs * 2)
        if self.mode == "twice":
            return output + self.first(inputs + 1) + self.second(inputs)
        return output  # the second layer is not called


def test_layers_that_stop_sharing_their_input_are_refused():
    model, data = ready(Diverging("another tensor")), batched(samples((6,), [0] * 7), [2, 5])
    with pytest.raises(LayerError, match=r"'first' and 'second' .* not later"):
        collect(model, data)


@pytest.mark.parametrize("mode", ["twice", "not called"])
def test_layers_that_share_only_some_of_their_inputs_are_refused_or_counted_right(mode):
    model, data = ready(Diverging(mode)), batched(samples((6,), [0] * 7), [2, 5])
    inputs = received(model, ["first", "second"], data)
    found = {}
    with suppress(LayerError):
        found = collect(model, data).layers
    for name, layer in found.items():
        assert_same(layer.moments, Moments.of(torch.cat(inputs[name])))


# ---- bounded memory


def test_a_sample_of_rows_is_bounded_seeded_and_of_the_rows():
    model, data = convolution_net("plain"), batched(samples((4, 6, 7), [0, 1, 2] * 4), 4)
    inputs = received(model, ["conv", "fc"], data)
    found, again = collect(model, data, sample=50, seed=3), collect(model, data, sample=50, seed=3)
    other = collect(model, data, sample=50, seed=4)
    for name, count in (("conv", 50), ("fc", 12)):
        sample = found[name].sample
        assert len(sample) == count
        assert sample.equal(again[name].sample)
        everything = flat_rows(model.get_submodule(name), inputs[name])
        assert (sample.unsqueeze(1) == everything).all(-1).any(1).all()
        assert_same(found[name].moments, Moments.of(everything))
    assert not found["conv"].sample.equal(other["conv"].sample)
    assert collect(model, data)["conv"].sample is None


def test_max_points_counts_the_first_rows_of_each_layer_and_stops_reading():
    model, data = convolution_net("stride"), batched(samples((4, 6, 7), [0, 1, 2] * 8), 4)
    read = []

    def reading():
        for batch in data:
            read.append(1)
            yield batch

    found = collect(model, reading(), max_points=7)
    assert len(read) == 2  # the classifier has one row a sample
    inputs = received(model, found.layers, data)
    for name, layer in found.layers.items():
        everything = flat_rows(model.get_submodule(name), inputs[name])
        assert_same(layer.moments, Moments.of(everything[:7]))


def held_bytes() -> int:
    """The memory of all tensors that Python can reach."""
    tensors = (item for item in gc.get_objects() if type(item) is Tensor)
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("per_class", ["means", "full"])
def test_max_points_leaves_no_class_sums_of_other_rows(per_class):
    model, data = convolution_net("stride"), batched(samples((4, 6, 7), [0, 1, 2] * 8), 4)
    for layer in collect(model, data, max_points=7, per_class=per_class).layers.values():
        assert layer.class_rows.sum() in (0, layer.moments.n)


@pytest.mark.parametrize("options", [{}, {"per_class": "full"}, {"sample": 10}], ids=["means", "full", "sample"])
def test_memory_does_not_grow_with_the_number_of_batches(options):
    model, batch = convolution_net("plain"), samples((4, 6, 7), [0, 1, 2, 1])
    held = []

    def data():
        for count in range(30):
            if count in (4, 29):
                gc.collect()
                held.append(held_bytes())
            yield batch

    collect(model, data(), **options)
    assert held[0] == held[1]


# ---- layers that cannot be collected


def with_spare() -> nn.Module:
    model = mlp()
    model.spare = nn.Linear(6, 6).double()
    model.forward = lambda inputs: model[4](model[3](model[2](model[1](model[0](inputs)))))
    return model


def with_tied() -> nn.Module:
    model = mlp((6, 6, 6, 4))
    model[2].weight = model[0].weight
    return model


def with_own_padding() -> nn.Module:
    model = cnn()
    model.conv2 = ready(SamePadding(5, 6, 3, stride=2, bias=False))
    return model


def with_weight_norm() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[2])
    return model


class Quantised(nn.Linear):
    """A linear layer whose weight is stored as whole numbers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, dtype=torch.float64)
        self.weight = nn.Parameter((layer.weight * 50).round().to(torch.int8), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight.double() / 50, self.bias)


def with_quantised() -> nn.Module:
    model = mlp()
    model[2] = Quantised(model[2])
    return model


UNFIT = {
    "never called": (with_spare, "spare", (6,), "never called"),
    "tied": (with_tied, "2", (6,), "shares its weight with 0"),
    "pads by itself": (with_own_padding, "conv2", (3, 6, 6), "SamePadding does something of its own"),
    "weight norm": (with_weight_norm, "2", (6,), "parametrized"),
    "quantised": (with_quantised, "2", (6,), "quantised"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_layer_that_cannot_be_edited_is_left_out_with_a_warning(kind):
    make, name, shape, reason = UNFIT[kind]
    with pytest.warns(UnmergeWarning, match=f"'{name}'.*{reason}"):
        found = collect(make(), batched(samples(shape, [0, 1, 2, 1]), 2))
    assert name not in found.layers
    assert reason in found.left_out[name]
    assert found.head in found.layers


@pytest.mark.parametrize("kind", UNFIT)
def test_a_layer_that_cannot_be_edited_is_an_error_when_named(kind):
    make, name, shape, reason = UNFIT[kind]
    with pytest.raises(LayerError, match=f"layer '{name}'.*{reason}"):
        collect(make(), batched(samples(shape, [0, 1, 2, 1]), 2), layers=[name])


def test_the_warning_points_at_the_callers_line():
    with pytest.warns(UnmergeWarning) as caught:
        collect(with_tied(), [samples((6,), [0, 1])])
    assert caught[0].filename == __file__


class Late(nn.Module):
    """A layer that only large batches reach."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.late, self.head = layer, nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.late(inputs) if len(inputs) > 2 else inputs)


def test_a_layer_that_is_reached_later_is_counted_and_proves_itself_then():
    data = batched(samples((6,), [0, 1, 2, 1, 0, 2]), [2, 4])
    found = collect(ready(Late(nn.Linear(6, 6))), data)
    assert_same(found["late"].moments, Moments.of(data[1][0]))
    assert found["late"].class_rows.tolist() == [1, 1, 2]

    class Doubled(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    with pytest.warns(UnmergeWarning, match="'late'.*Doubled"):
        assert list(collect(ready(Late(Doubled(6, 6))), data).layers) == ["head"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("batch", "sample"), [(0, 0), (0, 3), (1, 0)])
@pytest.mark.parametrize("layers", [None, ["0", "4"]])
def test_activations_that_are_not_finite_name_the_layer(value, batch, sample, layers):
    data = batched(samples((6,), [0, 1] * 4), 4)
    data[batch][0][sample, 2] = value
    with pytest.raises(DataError, match="layer '0' received NaN or infinite"):
        collect(mlp(), data, layers)


def test_activations_that_are_not_finite_end_a_pass_with_its_first_batch():
    read = []

    class Watched(list):
        def __iter__(self):
            for place, batch in enumerate(super().__iter__()):
                read.append(place)
                yield batch

    data = Watched(batched(samples((6,), [0, 1] * 20), 4))
    data[0][0][0, 2] = torch.nan
    with pytest.raises(DataError, match="layer '0' received NaN"):
        collect(mlp(), data)
    assert max(read) < len(data) - 2, "a long pass ends at once"


def test_activations_whose_squares_single_precision_cannot_sum_name_the_layer():
    data = [samples((6,), [0, 1, 1])[0].float() * 1e20]
    with pytest.raises(DataError, match=r"layer '0' received .* so large that the sums of their squares are infinite"):
        collect(mlp(dtype=torch.float32), data)


def test_activations_that_become_infinite_inside_the_model_name_the_first_layer_that_received_them():
    model = nn.Sequential(nn.Linear(6, 6), nn.Hardtanh(), nn.Linear(6, 6), nn.Linear(6, 2)).double()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.inf
    with pytest.raises(DataError, match="layer '3' received NaN or infinite"):
        collect(model, [samples((6,), [0, 1, 1])], layers=["0", "3"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_class", "median"),
        ("sample", -1),
        ("max_points", 0),
        ("max_points", -4),
        ("skip_layers", -1),
        ("skip_layers", "most"),
        ("layers", 5),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises((DataError, LayerError), match=name):
        collect(mlp(), [samples((6,), [0, 1, 1])], **{name: value})


class SequenceFirst(nn.Module):
    """A layer that sees (positions, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(inputs.transpose(0, 1)).mean(0))


def test_rows_that_are_not_ordered_by_sample_get_no_labels():
    batch = (torch.randn(4, 8, 6), torch.tensor([0, 1, 2, 3]))
    with pytest.warns(UnmergeWarning, match="'inner' does not have the samples in the first dimension"):
        assert list(collect(SequenceFirst(), [batch]).layers) == ["head"]
    with pytest.raises(LayerError, match="class labels"):
        collect(SequenceFirst(), [batch], ["inner"])
    assert collect(SequenceFirst(), [batch[0]], ["inner"])["inner"].moments.n == 32


def test_a_convolution_that_keeps_its_sizes_in_lists_is_read_like_others():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(12, 2))
    batch = (torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 0, 1]))
    expected = collect(model, [batch])["0"].moments.scatter
    model[0].stride, model[0].padding = [2, 2], [1, 1]
    assert torch.equal(collect(model, [batch])["0"].moments.scatter, expected)


class Doubling(nn.Linear):
    """A linear layer that does something of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


class SharedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.even, self.head = Doubling(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.odd(inputs) + self.even(inputs))


def test_a_layer_that_shares_its_input_with_one_that_is_left_out_is_counted():
    inputs = torch.randn(5, 6)
    with pytest.warns(UnmergeWarning, match="'odd' does not return"):
        found = collect(SharedInput(), [inputs])
    assert list(found.layers) == ["even", "head"]
    assert torch.allclose(found["even"].moments.mean.float(), inputs.mean(0))


def test_a_second_pass_sums_by_shift_where_the_first_did():
    model = cnn(dtype=torch.float32)
    first, second = (
        [batch[0].float()] for batch in (samples((3, 6, 6), [0, 1, 2, 1, 0], seed=seed) for seed in (0, 1))
    )
    known = collect(model, first)
    found = collect(model, second, known)
    for statistics in (known, found):
        assert not statistics["conv1"].moments.pivot.any(), "counted by shift"
        moments = statistics["fc"].moments
        assert moments.gram.dtype == torch.float32
        torch.testing.assert_close(moments.pivot, moments.mean.float().double(), rtol=1e-6, atol=0)
        assert moments.pivot.equal(moments.pivot.float().double())


@pytest.mark.parametrize(("model", "name", "shape"), [(cnn, "conv1", (3, 6, 6)), (mlp, "0", (6,))])
def test_batches_of_other_sizes_and_orders_leave_the_same_sums(model, name, shape):
    inputs, labels = samples(shape, [0, 1, 2, 1] * 150, seed=0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    expected = collect(model(dtype=torch.float32), batched((inputs.float(), labels), 12), [name])[name]
    for size in (5, 50, 600):
        batches = batched((inputs[order].float(), labels[order]), size)
        found = collect(model(dtype=torch.float32), batches, [name])[name]
        assert (found.moments.gram == expected.moments.gram).float().mean() > 0.98, "a last bit may differ"
        torch.testing.assert_close(found.moments.mean, expected.moments.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.class_sums, expected.class_sums, rtol=1e-12, atol=1e-12)
