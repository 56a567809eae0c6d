"""One forward pass: logits, labels and features, and a model that is left as it was."""

import copy

import pytest
import torch
from torch import Tensor, nn

from networks import batched, cnn, hf_resnet, hf_vit, mlp, request, samples
from unmerge.errors import DataError, LayerError
from unmerge.evaluation import outputs
from unmerge.evaluation.passes import feature_layer


def data(shape: tuple[int, ...] = (3, 6, 6), each: int = 8) -> dict[str, list]:
    forget, retain = request(shape, each=each)
    return {"forget": batched(forget, 5), "retain": batched(retain, 5)}


def inputs_of(split: list) -> Tensor:
    return torch.cat([batch[0] for batch in split])


def test_logits_features_and_labels() -> None:
    model, splits = mlp(), data((6,))
    found = outputs(model, splits)
    for name, split in splits.items():
        inputs = inputs_of(split)
        part = found[name]
        assert torch.allclose(part.logits, model(inputs).float(), atol=1e-6)
        assert torch.equal(part.labels, torch.cat([batch[1] for batch in split]))
        assert sorted(part.rows.tolist()) == list(range(len(part)))
        assert torch.allclose(part.features, model[:-1](inputs)[part.rows].float(), atol=1e-6)
    assert found.feature_layer == "4:input"


def test_features_are_a_draw_by_content() -> None:
    model, splits = mlp(), data((6,), each=40)
    everything = outputs(model, splits)["retain"]
    few = outputs(model, splits, keep_features=7)["retain"]
    assert torch.equal(few.rows, everything.rows[:7])
    assert torch.equal(few.features, everything.features[:7])
    other = outputs(model, splits, keep_features=7, seed=1)["retain"]
    assert not torch.equal(other.rows, few.rows)
    shuffled = {"retain": splits["retain"][::-1]}
    again = outputs(model, shuffled, keep_features=7)["retain"]
    assert torch.allclose(again.features, few.features, atol=1e-6)
    assert outputs(model, splits, keep_features=0)["retain"].features is None


def test_model_is_left_as_found() -> None:
    model = cnn().train()
    model.bn1.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    outputs(model, data())

    def broken() -> object:
        yield from data()["forget"][:1]
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        outputs(model, {"forget": broken()})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model.bn1.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("build", "shape", "width"), [(hf_vit, (3, 8, 8), 8), (hf_resnet, (3, 32, 32), 6)])
def test_transformers_models_and_mappings(build: object, shape: tuple[int, ...], width: int) -> None:
    images, labels = samples(shape, [0, 1, 2, 1, 0])
    model = build()
    found = outputs(model, {"test": [{"pixel_values": images, "labels": labels}]})["test"]
    assert torch.allclose(found.logits, model(images).logits.float(), atol=1e-6)
    assert found.features.shape == (5, width)


def test_named_layers() -> None:
    model, splits = cnn(), data()
    images = inputs_of(splits["forget"])
    maps = torch.relu(model.bn1(model.conv1(images)))
    pooled = outputs(model, splits, features="conv2:input")["forget"]
    assert torch.allclose(pooled.features, maps.mean((2, 3))[pooled.rows].float(), atol=1e-6)
    assert outputs(model, splits, features="conv2")["forget"].features.shape[1] == 6
    with pytest.raises(LayerError, match=r"no layer 'conv3'.*Did you mean 'conv"):
        outputs(model, splits, features="conv3")


class NoHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


def test_a_model_without_a_linear_head_says_how_to_name_the_layer() -> None:
    with pytest.raises(LayerError, match=r"NoHead has no nn.Linear.*features='avgpool'"):
        feature_layer(NoHead())
    splits = {"forget": [(torch.zeros(2, 3, 6, 6), torch.tensor([0, 1]))]}
    assert outputs(NoHead(), splits, features="conv")["forget"].features.shape == (2, 4)
    assert outputs(NoHead(), splits, keep_features=0)["forget"].logits.shape == (2, 4)


class Odd(nn.Module):
    """Returns whatever it is told, and has a linear layer that is never called."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.answer = answer

    def forward(self, inputs: Tensor) -> object:
        return self.answer


def test_answers_that_are_no_logits() -> None:
    batch = [(torch.zeros(2, 3), torch.tensor([0, 1]))]
    with pytest.raises(DataError, match="no logits but a dict with hidden, loss"):
        outputs(Odd({"hidden": torch.zeros(2, 2), "loss": 1}), {"test": batch}, keep_features=0)
    with pytest.raises(DataError, match=r"shape \(2, 5, 7\) for 2 samples"):
        outputs(Odd(torch.zeros(2, 5, 7)), {"test": batch}, keep_features=0)
    with pytest.raises(DataError, match="NaN logits on split 'test'"):
        outputs(Odd(torch.full((2, 2), torch.nan)), {"test": batch}, keep_features=0)
    with pytest.raises(LayerError, match="'fc' was not called"):
        outputs(Odd(torch.zeros(2, 2)), {"test": batch})


def test_wrong_data() -> None:
    model = mlp()
    inputs = torch.zeros(3, 6, dtype=torch.float64)
    with pytest.raises(DataError, match="'forget' has no class labels"):
        outputs(model, {"forget": [inputs]})
    with pytest.raises(DataError, match="forget: the data gave no batch"):
        outputs(model, {"forget": []})
    with pytest.raises(DataError, match="'forget' is empty"):
        outputs(model, {"forget": [(inputs[:0], torch.zeros(0, dtype=torch.int64))]})
    with pytest.raises(DataError, match=r"2 labels outside the 4 classes of model 'model': -1, 9"):
        outputs(model, {"forget": [(inputs, torch.tensor([0, 9, -1]))]})
