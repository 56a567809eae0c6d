"""A LoRA adapter of others is an edit that at alpha 1 does what PEFT's merge does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from requests_at_hand import bits
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from decoders import decoder
from networks import conv1d_net, convolution_net, hf_vit, mlp
from unmerge import Edit
from unmerge.errors import EditError, FileError

ADAPTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (lambda: decoder("llama"), {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 5}),
    "rslora": (lambda: decoder("llama"), {"target_modules": ["v_proj"], "r": 3, "lora_alpha": 5, "use_rslora": True}),
    "patterns": (
        lambda: decoder("llama"),
        {
            "target_modules": ["v_proj", "up_proj", "gate_proj"],
            "r": 3,
            "rank_pattern": {"up_proj": 2, "layers.1.mlp.gate_proj": 4, r"^model.layers.2.+v_proj": 1},
            "alpha_pattern": {"layers.0.mlp.up_proj": 7, "gate_proj": 6, ".+_proj": 5},
            "use_rslora": True,
        },
    ),
    "gaussian start": (lambda: decoder("llama"), {"target_modules": ["o_proj"], "init_lora_weights": "gaussian"}),
    "gpt2": (lambda: decoder("gpt2"), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "more directions than inputs": (mlp, {"target_modules": ["0", "4"], "r": 11}),
    "bias": (mlp, {"target_modules": ["0", "2"], "lora_bias": True, "lora_alpha": 3, "r": 2}),
    "vit": (hf_vit, {"target_modules": "all-linear", "r": 2, "lora_bias": True}),
    "convolution": (lambda: convolution_net("stride"), {"target_modules": ["conv", "stem", "fc"], "lora_bias": True}),
    "conv1d and linear": (conv1d_net, {"target_modules": ["0", "2"]}),
}


def saved(model: nn.Module, directory: Path, **settings: Any) -> PeftModel:
    """A PEFT model with an adapter that changes something, and that adapter on disk."""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    adapted.save_pretrained(directory)
    return adapted


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
@pytest.mark.filterwarnings("ignore:Adapter 'default'.* have invalid shape")  # which PEFT says of any lora_bias
@pytest.mark.parametrize("kind", ADAPTERS)
def test_applying_it_equals_merging_it(kind: str, tmp_path: Path):
    make, settings = ADAPTERS[kind]
    model = make()
    saved(model, tmp_path, **settings)
    edit = Edit.from_peft(tmp_path, base=model)
    assert edit.alpha == 1.0
    for layer in edit.layers.values():
        assert_close(layer.Q.mT @ layer.Q, torch.eye(layer.rank, dtype=layer.Q.dtype))
    before = bits(model)
    merged = bits(PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).merge_and_unload())
    half = {name: (before[name] + merged[name]) / 2 for name in before}
    with edit.applied(model):
        assert_close(bits(model), merged)
    with edit.applied(model, 0.5):
        assert_close(bits(model), half)
    edit.save(tmp_path / "edit")
    with Edit.load(tmp_path / "edit").applied(model):
        assert_close(bits(model), merged)


def test_without_the_base_it_is_bound_to_nothing(tmp_path: Path):
    model = decoder("gpt2")
    adapted = saved(model, tmp_path, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    edit = Edit.from_peft(tmp_path)
    with pytest.raises(EditError, match=r"does not say which weights.*force=True.*base=model"):
        edit.apply(model)
    assert_close(bits(edit.apply(model, force=True)), bits(adapted.merge_and_unload()))


def test_with_the_base_it_is_bound_to_its_weights(tmp_path: Path):
    model = decoder("llama")
    saved(model, tmp_path, target_modules=["q_proj"])
    edit = Edit.from_peft(tmp_path, base=model)
    with pytest.raises(EditError, match=r"other weights of model.layers.0.self_attn.q_proj"):
        edit.apply(decoder("llama", seed=1))


def test_an_adapter_of_unmerge_that_peft_wrote_again_is_read_as_any_other(tmp_path: Path):
    model = decoder("llama")
    saved(model, tmp_path / "first", target_modules=["q_proj"])
    edit = Edit.from_peft(tmp_path / "first", base=model)
    edit.to_peft(tmp_path / "second", base=model)
    PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "second").save_pretrained(tmp_path / "third")
    again = Edit.from_peft(tmp_path / "third", base=model)
    with edit.applied(model):
        expected = bits(model)
    assert_close(bits(again.apply(model)), expected)


# ---- what is no plain LoRA


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "lora_embedding_A"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base weights"),
        ({"bias": "all"}, "bias='all'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_variants_are_refused_by_name(settings: dict[str, Any], says: str, tmp_path: Path):
    saved(decoder("llama", dtype=torch.float32), tmp_path, **{"target_modules": ["q_proj"], **settings})
    with pytest.raises(FileError, match=says):
        Edit.from_peft(tmp_path)


def test_other_adapters_are_refused_by_their_type(tmp_path: Path):
    settings = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(decoder("llama"), settings).save_pretrained(tmp_path)
    with pytest.raises(FileError, match="an adapter of type 'IA3'"):
        Edit.from_peft(tmp_path)


def test_another_base_is_named_by_what_differs(tmp_path: Path):
    saved(decoder("llama"), tmp_path / "llama", target_modules=["q_proj"])
    with pytest.raises(EditError, match=r"base has no model.layers.2.self_attn.q_proj"):
        Edit.from_peft(tmp_path / "llama", base=decoder("llama", blocks=2))
    with pytest.raises(EditError, match=r"model.layers.0.self_attn.q_proj.weight.* have other shapes"):
        Edit.from_peft(tmp_path / "llama", base=decoder("llama", hidden_size=12))
    saved(convolution_net("plain"), tmp_path / "plain", target_modules=["conv"])
    with pytest.raises(EditError, match=r"conv \(dilation \(2, 2\)\)"):
        Edit.from_peft(tmp_path / "plain", base=convolution_net("dilation"))


def test_damaged_directories_are_said_so(tmp_path: Path):
    saved(decoder("llama"), tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, path)
    with pytest.raises(FileError, match=r"lacks lora_A or lora_B of model.layers.1.self_attn.q_proj"):
        Edit.from_peft(tmp_path)
    save_file({**tensors, key: tensors[key][:-1]}, path)
    with pytest.raises(FileError, match="have other ranks"):
        Edit.from_peft(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(FileError, match="no configuration of an adapter"):
        Edit.from_peft(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(FileError, match=r"no adapter_config.json"):
        Edit.from_peft(tmp_path)
