"""An edit travels as a PEFT adapter: the adapter equals the edited weights, and comes back as the edit."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from requests_at_hand import BLOCKS, PLAIN, TEXTS, bits, image_edit, inputs_of, language_edit, logits, saved_decoder
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from decoders import decoder
from full_disk import full_after
from networks import cnn, conv1d_net, convolution_net, hf_vit, mlp, ready
from unmerge import Edit, LayerEdit, Recipe
from unmerge.errors import EditError, FileError, LayerError
from unmerge.storage.files import read_tensors

PRESERVING = PLAIN.but(mean="preserve")
MODELS: dict[str, Callable[[], tuple[nn.Module, Edit, Any]]] = {}


def case(name: str) -> Callable[[Callable[[], tuple[nn.Module, Edit, Any]]], None]:
    return lambda make: MODELS.update({name: functools.cache(make)})


@case("llama")
def _() -> tuple[nn.Module, Edit, Any]:
    model = decoder("llama")
    return model, language_edit(model), TEXTS


@case("llama-tied")
def _() -> tuple[nn.Module, Edit, Any]:
    model = decoder("llama", tied=True)
    return model, language_edit(model), TEXTS


@case("gpt2")
def _() -> tuple[nn.Module, Edit, Any]:
    model = decoder("gpt2")
    return model, language_edit(model), TEXTS


@case("gpt2-preserving")
def _() -> tuple[nn.Module, Edit, Any]:
    model = decoder("gpt2")
    return model, language_edit(model, BLOCKS.but(mean="preserve")), TEXTS


@case("qwen2-biased-layers-preserving")
def _() -> tuple[nn.Module, Edit, Any]:
    model = decoder("qwen2")
    return model, language_edit(model, BLOCKS.but(mean="preserve", layers=r"re:[qkv]_proj")), TEXTS


@case("mlp-preserving")
def _() -> tuple[nn.Module, Edit, Any]:
    model = mlp()
    return model, image_edit(model, (6,), PRESERVING), inputs_of((6,))


@case("mlp-shrinking-biases")
def _() -> tuple[nn.Module, Edit, Any]:
    model = mlp()
    return model, image_edit(model, (6,), PLAIN.but(bias="shrink", gamma=0.5)), inputs_of((6,))


@case("vit-preserving")
def _() -> tuple[nn.Module, Edit, Any]:
    model = hf_vit()
    return model, image_edit(model, (3, 8, 8), PRESERVING), inputs_of((3, 8, 8))


for kind in ("plain", "pointwise", "stride", "valid"):

    @case(f"convolution-{kind}")
    def _(kind: str = kind) -> tuple[nn.Module, Edit, Any]:
        model = convolution_net(kind)
        return model, image_edit(model, (4, 6, 7), PRESERVING), inputs_of((4, 6, 7))


# PEFT says so where an adapter has layers of both storage orders, and corrects it.
MIXED = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")


@MIXED
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("alpha", [1.0, 1.7])
def test_the_adapter_equals_the_edited_weights_toggles_merges_and_unmerges(kind: str, alpha: float, tmp_path: Path):
    model, edit, inputs = MODELS[kind]()
    before, plain = bits(model), logits(model, inputs)
    edit.to_peft(tmp_path, alpha, base=model if alpha == 1 else None)
    with edit.applied(model, alpha):
        edited, expected = bits(model), logits(model, inputs)
    assert (expected - plain).abs().max() > 1e-3

    adapted = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    assert_close(logits(adapted, inputs), expected)
    with adapted.disable_adapter():
        assert_close(logits(adapted, inputs), plain, rtol=0, atol=0)
    adapted.merge_adapter()
    assert_close(logits(adapted, inputs), expected)
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        assert_close(logits(adapted, inputs), plain)
    assert_close(bits(adapted.merge_and_unload()), edited)
    assert_close(bits(model), before, rtol=0, atol=0)


@MIXED
@pytest.mark.parametrize("kind", MODELS)
def test_the_edit_comes_back(kind: str, tmp_path: Path):
    model, edit, _ = MODELS[kind]()
    model = copy.deepcopy(model)
    edit.to_peft(tmp_path, 1.7)
    found = Edit.from_peft(tmp_path)
    assert found.to_dict() == edit.to_dict()
    for name, layer in edit.layers.items():
        assert_close(found.layers[name].Q, layer.Q, rtol=0, atol=0)
        assert_close(found.layers[name].B, layer.B)
        assert (found.layers[name].shift is None) == (layer.shift is None)
        if layer.shift is not None:
            assert_close(found.layers[name].shift, layer.shift)
    expected = bits(edit.apply(copy.deepcopy(model), 0.4))
    assert_close(bits(found.apply(model, 0.4)), expected)


def test_at_alpha_1_the_edit_comes_back_bit_for_bit(tmp_path: Path):
    model = decoder("llama", dtype=torch.float32)
    edit = language_edit(model)
    edit.to_peft(tmp_path, 1.0)
    found = Edit.from_peft(tmp_path, base=model)
    for name, layer in edit.layers.items():
        assert torch.equal(found.layers[name].B, layer.B)


def test_the_tensors_and_settings_are_those_of_lora(tmp_path: Path):
    model = mlp(dtype=torch.float32)
    edit = image_edit(model, (6,), PRESERVING)
    edit.to_peft(tmp_path, 1.7, base="somebody/some-model")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(tensors) == sorted(
        f"base_model.model.{name}.lora_{part}"
        for name in ("0", "2", "4")
        for part in ("A.weight", "B.weight", "B.bias")
    )
    for name, layer in edit.layers.items():
        assert torch.equal(tensors[f"base_model.model.{name}.lora_A.weight"], layer.Q.T)
        assert_close(tensors[f"base_model.model.{name}.lora_B.weight"], -1.7 * layer.B)
        assert_close(tensors[f"base_model.model.{name}.lora_B.bias"], 1.7 * layer.shift)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "somebody/some-model"
    assert config["lora_bias"] is True
    assert config["r"] == config["lora_alpha"] == max(layer.rank for layer in edit.layers.values())


def hand_made(model: nn.Module, ranks: dict[str, int]) -> Edit:
    generator = torch.Generator().manual_seed(7)
    layers = {}
    for name, rank in ranks.items():
        out, inputs = model.get_submodule(name).weight.shape
        basis = torch.linalg.qr(torch.randn(inputs, rank, generator=generator, dtype=torch.float64))[0]
        layers[name] = LayerEdit(torch.randn(out, rank, generator=generator, dtype=torch.float64), basis)
    return Edit(layers, Recipe(), alpha=1.3)


class Twins(nn.Module):
    """A layer "fc" whose name ends that of two others, one of which is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"fc": nn.Linear(6, 6)})
        self.fc = nn.Linear(6, 5)
        self.outer = nn.ModuleDict({"fc": nn.ReLU()})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.outer["fc"](self.inner["fc"](inputs)))


@pytest.mark.parametrize("ranks", [{"fc": 2}, {"inner.fc": 3}, {"fc": 1, "inner.fc": 4}, {"fc": 4, "inner.fc": 1}])
@pytest.mark.parametrize("force_base", [False, True])
def test_ranks_differ_and_only_the_edited_layers_are_targets(ranks: dict[str, int], force_base: bool, tmp_path: Path):
    model = ready(Twins())
    edit, inputs = hand_made(model, ranks), inputs_of((6,))
    if force_base:
        edit.weights.update(edit_weights(edit, model))
    edit.to_peft(tmp_path, base=model if force_base else None)
    with edit.applied(model, force=True):
        expected = logits(model, inputs)
    adapted = PeftModel.from_pretrained(model, tmp_path)
    targets = {name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "lora_A")}
    assert targets == set(ranks)
    assert_close(logits(adapted, inputs), expected)


def edit_weights(edit: Edit, model: nn.Module) -> dict[str, str]:
    from unmerge.placement.state import state_of
    from unmerge.storage.fingerprint import fingerprint

    state = state_of(model)
    return fingerprint({name: state[name] for name in edit.touched})


def test_targets_are_a_list_of_names_where_that_is_unambiguous(tmp_path: Path):
    model = decoder("llama")
    edit = language_edit(model)
    edit.to_peft(tmp_path / "listed", base=model, alpha=1.0)
    edit.to_peft(tmp_path / "pattern", alpha=1.0)
    listed, pattern = (
        json.loads((tmp_path / kind / "adapter_config.json").read_text())["target_modules"]
        for kind in ("listed", "pattern")
    )
    assert listed == list(edit.layers)
    names = [name for name, _ in model.named_modules()]
    assert [name for name in names if re.fullmatch(pattern, name)] == [name for name in names if name in edit.layers]


def test_a_bfloat16_model_answers_as_the_edited_one_does(tmp_path: Path):
    model = decoder("llama", dtype=torch.bfloat16)
    edit = language_edit(model)
    edit.to_peft(tmp_path, 1.0, base=model)
    assert load_file(tmp_path / "adapter_model.safetensors").popitem()[1].dtype == torch.float32
    exact = logits(edit.apply(copy.deepcopy(model).double(), 1.0, force=True), TEXTS)
    with edit.applied(model, 1.0):
        rounded = logits(model, TEXTS)
    found = logits(PeftModel.from_pretrained(model, tmp_path), TEXTS)
    assert (found - exact).norm() < 1.5 * (rounded - exact).norm()


def test_the_adapter_finds_its_base_by_itself(tmp_path: Path):
    saved_decoder(tmp_path / "base", dtype=torch.float32)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    edit = language_edit(model)
    edit.to_peft(tmp_path / "adapter", 1.0, base=model)
    adapted = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert_close(logits(adapted, TEXTS), logits(edit.apply(model, 1.0), TEXTS))


# ---- what no adapter can hold


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: image_edit(mlp(), (6,), PLAIN.but(head="remove")), r"removal of the rows \[0\] of '4'"),
        (lambda: image_edit(cnn(), (3, 6, 6), PLAIN.but(mean="auto")), "conv1, conv2, which a BatchNorm takes"),
        (lambda: image_edit(convolution_net("groups"), (4, 6, 7)), r"the change of 'conv' \(2 groups\)"),
        (lambda: image_edit(convolution_net("dilation"), (4, 6, 7)), r"the change of 'conv' \(dilation \(2, 2\)\)"),
        (lambda: image_edit(convolution_net("reflect"), (4, 6, 7)), "the change of 'conv' .padding of 'reflect'"),
        (
            lambda: language_edit(decoder("qwen2"), BLOCKS.but(mean="auto")),
            "the constants of model.layers.0.self_attn.q_proj.* since .*o_proj.* have no bias",
        ),
        (lambda: image_edit(ready(nn.Linear(6, 4)), (6,)), "it is the whole model"),
    ],
)
def test_what_an_adapter_would_drop_is_listed_with_the_way_out(make: Callable[[], Edit], says: str, tmp_path: Path):
    edit = make()
    with pytest.raises(EditError, match=says) as error:
        edit.to_peft(tmp_path / "adapter", 1.0)
    assert "edit_checkpoint" in str(error.value)
    assert "mean='orthogonal'" in str(error.value)
    assert not (tmp_path / "adapter").exists()


def test_a_layer_without_a_constant_but_with_a_bias_is_no_hindrance_where_the_base_shows_it(tmp_path: Path):
    model = mlp()
    edit = image_edit(model, (6,), PRESERVING)
    layer = edit.layers["2"]
    edit.layers["2"] = LayerEdit(layer.B, layer.Q)
    with pytest.raises(EditError, match="the constants of 0, 4, since 2 have no bias"):
        edit.to_peft(tmp_path, 1.0)
    edit.weights.pop("2.bias")
    edit.to_peft(tmp_path, 1.0, base=model)
    inputs = inputs_of((6,))
    with edit.applied(model, 1.0):
        expected = logits(model, inputs)
    adapted = PeftModel.from_pretrained(model, tmp_path)
    adapted.merge_adapter()
    assert_close(logits(adapted, inputs), expected)


def test_strengths_are_checked(tmp_path: Path):
    edit = language_edit(decoder("llama"))
    with pytest.raises(EditError, match="recommends no strength"):
        edit.to_peft(tmp_path)
    with pytest.raises(EditError, match="alpha=0"):
        edit.to_peft(tmp_path, 0.0)
    with pytest.raises(EditError, match="alpha=-1"):
        edit.to_peft(tmp_path, -1)


def test_another_base_is_named_by_what_differs(tmp_path: Path):
    model, other = decoder("llama"), decoder("llama", seed=1)
    edit = language_edit(model)
    edit.to_peft(tmp_path, 1.0)
    with pytest.raises(EditError, match=r"fitted on other weights of model\.layers\.0\.self_attn\.q_proj"):
        edit.to_peft(tmp_path, 1.0, base=other)
    with pytest.raises(EditError, match=r"fitted on other weights of model\.layers\.0\.self_attn\.q_proj"):
        Edit.from_peft(tmp_path, base=other)
    with pytest.raises(EditError, match=r"has no model\.layers\.2"):
        Edit.from_peft(tmp_path, base=decoder("llama", blocks=2))
    with pytest.raises(LayerError, match="carries PEFT adapters itself"):
        Edit.from_peft(tmp_path, base=PeftModel.from_pretrained(copy.deepcopy(model), tmp_path))


# ---- files


def test_a_full_disk_leaves_what_was_there(tmp_path: Path):
    model = decoder("llama")
    edit = language_edit(model)
    with full_after(1000), pytest.raises((FileError, OSError)):
        edit.to_peft(tmp_path / "new", 1.0)
    assert not list((tmp_path / "new").glob("*"))
    edit.to_peft(tmp_path / "old", 1.0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    with full_after(1000), pytest.raises((FileError, OSError)):
        edit.to_peft(tmp_path / "old", 2.0)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_what_stands_in_the_way_of_an_adapter_is_told_and_left(tmp_path: Path):
    edit = language_edit(decoder("llama"))
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "adapter"):
        with pytest.raises(FileError, match="file is a file; expected a folder"):
            edit.to_peft(target, 1.0)
    place = tmp_path / "adapter"
    (place / "adapter_model.safetensors").mkdir(parents=True)
    (place / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError, match=r"adapter_model\.safetensors is a folder"):
        edit.to_peft(place, 1.0)
    assert (place / "adapter_config.json").read_text() == "{}"


def test_damage_is_found(tmp_path: Path):
    edit = language_edit(decoder("llama"))
    edit.to_peft(tmp_path, 1.0)
    path = tmp_path / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="was changed after it was written"):
        Edit.from_peft(tmp_path)
    path.write_bytes(content[:200])
    with pytest.raises(FileError, match="damaged"):
        Edit.from_peft(tmp_path)


def test_no_adapter_is_said_so(tmp_path: Path):
    with pytest.raises(FileError, match=r"no adapter_model\.safetensors"):
        Edit.from_peft(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(FileError, match="pickle"):
        Edit.from_peft(tmp_path)


def test_what_the_edit_says_of_itself_is_in_the_file(tmp_path: Path):
    edit = image_edit(conv1d_net(), (6,))
    edit.to_peft(tmp_path, 2.0)
    header = read_tensors(tmp_path / "adapter_model.safetensors", "adapter")[1]
    assert header == {**edit.to_dict(), "exported_alpha": 2.0}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True
