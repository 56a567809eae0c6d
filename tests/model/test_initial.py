"""The weights before fine-tuning, however they are given."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from decoders import decoder
from networks import cnn, hf_vit, mlp
from unmerge.errors import FileError, InitError
from unmerge.model.initial import initial_weights, task_vectors
from unmerge.model.origin import check_origin

NAMES = ["0.weight", "2.weight", "2.bias"]


def fine_tuned() -> nn.Module:
    return mlp(seed=0)


def pretrained() -> nn.Module:
    return mlp(seed=1)


def expected() -> dict[str, Tensor]:
    return {name: pretrained().state_dict()[name] for name in NAMES}


def test_zero_is_zeros_like_each_parameter():
    model = mlp(dtype=torch.bfloat16)
    found = initial_weights(model, "zero", NAMES)
    assert list(found) == NAMES
    for name, value in found.items():
        own = model.get_parameter(name)
        assert (value.shape, value.dtype) == (own.shape, own.dtype)
        assert not value.any()


def shards(directory: Path) -> Path:
    """A sharded checkpoint, one tensor a file."""
    places = {}
    for place, (name, tensor) in enumerate(pretrained().state_dict().items()):
        file = f"model-{place:05}.safetensors"
        save_file({name: tensor}, directory / file)
        places[name] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def test_modules_state_dicts_files_and_directories_give_the_same_weights(tmp_path):
    state = pretrained().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "shards").mkdir()
    (tmp_path / "bin").mkdir()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    for init in (
        pretrained(),
        state,
        tmp_path / "model.safetensors",
        str(tmp_path / "model.pt"),
        tmp_path,
        str(shards(tmp_path / "shards")),
        tmp_path / "bin",
    ):
        assert_close(initial_weights(fine_tuned(), init, NAMES), expected(), rtol=0, atol=0)


def mixtral(seed: int) -> nn.Module:
    return decoder("mixtral", seed=seed, dtype=torch.float32)


@pytest.mark.parametrize("make", [hf_vit, mixtral])
def test_a_transformers_checkpoint_is_read_whatever_names_its_file_has(tmp_path, make):
    start, model = make(seed=1), make(seed=0)
    start.save_pretrained(tmp_path)
    drawn = torch.random.get_rng_state()
    found = initial_weights(model, tmp_path, dict(model.named_parameters()))
    assert torch.random.get_rng_state().equal(drawn)
    assert_close(found, {name: value.detach() for name, value in start.named_parameters()}, rtol=0, atol=0)


def test_what_a_transformers_checkpoint_lacks_is_named_and_not_drawn(tmp_path):
    start, model = hf_vit(seed=1), hf_vit(seed=0)
    start.vit.save_pretrained(tmp_path)  # no classifier
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(InitError, match=r"lacks 2 of the \d+ .*: classifier\.weight, classifier\.bias\. "):
        initial_weights(model, tmp_path, names)
    kept = [name for name in names if not name.startswith("classifier")]
    assert initial_weights(model, tmp_path, kept)[kept[-1]].equal(start.get_parameter(kept[-1]))


def test_a_transformers_checkpoint_of_another_kind_is_refused(tmp_path):
    mixtral(1).save_pretrained(tmp_path)
    with pytest.raises(InitError, match=r"lacks .* It has lm_head\.weight"):
        initial_weights(hf_vit(), tmp_path, ["classifier.weight"])


def test_a_damaged_transformers_checkpoint_is_an_error_of_its_directory(tmp_path):
    model = hf_vit()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))
    with pytest.raises(FileError, match=tmp_path.name):
        initial_weights(model, tmp_path, ["not.there"])


def test_only_the_shards_that_are_needed_are_opened(tmp_path):
    shards(tmp_path)
    order = list(pretrained().state_dict())
    for name in ("4.weight", "0.bias"):
        (tmp_path / f"model-{order.index(name):05}.safetensors").write_bytes(b"damaged")
    assert_close(initial_weights(fine_tuned(), tmp_path, NAMES), expected(), rtol=0, atol=0)
    with pytest.raises(FileError, match="damaged"):
        initial_weights(fine_tuned(), tmp_path, ["4.weight"])


def test_weights_keep_their_own_precision():
    model = mlp(dtype=torch.bfloat16)
    assert initial_weights(model, pretrained(), NAMES)["0.weight"].dtype == torch.float64


def test_all_missing_names_are_listed():
    state = pretrained().state_dict()
    del state["0.weight"], state["2.bias"]
    with pytest.raises(InitError, match=r"lacks 2 of the 3 .*: 0\.weight, 2\.bias\.") as refused:
        initial_weights(fine_tuned(), state, NAMES)
    assert "0.bias" in str(refused.value)  # what it has instead
    many = [f"{name}.weight" for name, module in hf_vit().named_modules() if isinstance(module, nn.Linear)]
    with pytest.raises(InitError) as refused:
        initial_weights(hf_vit(), {"other": torch.zeros(1)}, many)
    assert len(many) > 8
    assert all(name in str(refused.value) for name in many)


def test_all_other_shapes_are_listed():
    with pytest.raises(InitError) as refused:
        initial_weights(fine_tuned(), mlp((6, 9, 7, 4)), NAMES)
    assert "0.weight is (9, 6) in init and (8, 6) in the model" in str(refused.value)
    assert "2.weight is (7, 9) in init and (7, 8) in the model" in str(refused.value)
    assert "2.bias" not in str(refused.value)


def test_the_models_own_weights_are_no_start():
    with pytest.raises(InitError, match="same weights as the model"):
        initial_weights(fine_tuned(), fine_tuned(), NAMES)
    with pytest.raises(InitError, match="same weights as the model"):
        initial_weights(cnn(), cnn().state_dict(), ["conv1.weight"])


def test_a_layer_that_fine_tuning_left_alone_is_fine():
    start = fine_tuned()
    with torch.no_grad():
        start[2].weight += 1
    assert initial_weights(fine_tuned(), start, NAMES)["0.weight"].equal(start[0].weight)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    state = pretrained().state_dict()
    state["2.weight"][0, 0] = value
    with pytest.raises(InitError, match=r"2\.weight"):
        initial_weights(fine_tuned(), state, NAMES)


@pytest.mark.parametrize("init", [None, 0, [1, 2], torch.zeros(3)])
def test_what_is_no_checkpoint_is_refused_with_what_is(init):
    with pytest.raises(InitError, match=f"{type(init).__name__}.*'zero'"):
        initial_weights(fine_tuned(), init, NAMES)


@pytest.mark.parametrize(
    "change", [lambda tensor: tensor.tolist(), lambda tensor: tensor.numpy()], ids=["list", "numpy"]
)
def test_a_state_dict_of_something_other_than_tensors_is_refused_by_name(change):
    state = {name: change(tensor) for name, tensor in pretrained().state_dict().items()}
    with pytest.raises(InitError, match=r"0\.weight"):
        initial_weights(fine_tuned(), state, NAMES)


@pytest.mark.parametrize("init", ["zeros", "imagenet", "no/such/file.safetensors"])
def test_a_path_that_is_not_there_is_refused_with_the_word_zero(init):
    with pytest.raises(FileError, match=f"{init}.*'zero'"):
        initial_weights(fine_tuned(), init, NAMES)


def test_an_empty_directory_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(FileError, match=r"model\.safetensors"):
        initial_weights(fine_tuned(), tmp_path, NAMES)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"0.weight": 3}}', "\udcff"])
def test_a_damaged_index_is_a_file_error(tmp_path, index):
    raw = index.encode("utf-8", "surrogateescape")
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(FileError, match=r"index\.json"):
        initial_weights(fine_tuned(), tmp_path, NAMES)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, place):
    save_file(pretrained().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(NAMES, place)})
    )
    with pytest.raises(FileError, match="outside its directory"):
        initial_weights(fine_tuned(), tmp_path / "checkpoint", NAMES)


def test_a_pickled_model_is_refused(tmp_path):
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(pretrained()))
    torch.save(pretrained(), tmp_path / "model.pt")
    for name in ("model.pkl", "model.pt"):
        with pytest.raises(FileError, match="without running code"):
            initial_weights(fine_tuned(), tmp_path / name, NAMES)


class Largest(TorchDispatchMode):
    """Notes how many entries the largest tensor has that is made, views apart."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and all(entry.alias_info is None for entry in func._schema.returns):
            self.entries = max(self.entries, result.numel())
        return result


def test_weights_of_many_experts_are_compared_one_by_one():
    tuned, start = (decoder("mixtral", blocks=1, seed=seed).to(torch.bfloat16) for seed in (0, 1))
    name = "model.layers.0.mlp.experts.down_proj"
    weight, initial = tuned.get_parameter(name), start.get_parameter(name)
    with Largest() as largest:
        found = task_vectors(tuned, start, [f"{name}[{place}]" for place in range(len(weight))])
        assert found.has_moved(name)
        with pytest.raises(InitError, match="does not look like the checkpoint"):
            check_origin(found.pairs())
    assert largest.entries == weight[0].numel()
    pairs = list(found.pairs())
    assert_close(torch.stack([pair[0] for pair in pairs]), weight.detach().float())
    assert_close(torch.stack([pair[1] for pair in pairs]), initial.detach().float())
    with torch.no_grad():
        initial.copy_(weight)
        initial[3, 2, 1] += 1
    assert task_vectors(tuned, start, [f"{name}[3]"]).has_moved(name), "one entry of one expert"
