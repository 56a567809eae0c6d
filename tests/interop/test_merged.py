"""A model that a PEFT adapter fine-tuned: merged, its task vector is what the adapter added."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from requests_at_hand import PLAIN, TEXTS, bits, language_edit, logits
from torch import nn
from torch.testing import assert_close

import unmerge
from decoders import decoder
from networks import hf_vit, request
from unmerge.errors import InitError, LayerError, UnmergeWarning
from unmerge.interop.peft import merged

TARGETS = r"model\.layers\.[12]\.(self_attn\.v_proj|mlp\.down_proj)"
ADAPTED = [f"model.layers.{block}.{name}" for block in (1, 2) for name in ("self_attn.v_proj", "mlp.down_proj")]


def adapted(model: nn.Module, **settings: Any) -> PeftModel:
    """The model with an adapter that changes something."""
    found = get_peft_model(copy.deepcopy(model), LoraConfig(**{"target_modules": TARGETS, "r": 2, **settings}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=0.2)
    return found.eval()


def by_hand(peft_model: PeftModel) -> dict[str, torch.Tensor]:
    """W + s·BA of each adapted layer."""
    found = {}
    for name in ADAPTED:
        layer = peft_model.get_base_model().get_submodule(name)
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        found[f"{name}.weight"] = layer.base_layer.weight + layer.scaling["default"] * product
    return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("was_merged", [False, True])
@torch.no_grad()
def test_it_equals_merging_by_hand_and_init_is_the_base(in_place: bool, was_merged: bool):
    base = decoder("llama")
    peft_model = adapted(base)
    weights, expected = by_hand(peft_model), logits(peft_model, TEXTS)
    if was_merged:
        peft_model.merge_adapter()
    model, init = merged(peft_model, in_place=in_place)
    assert type(model) is type(base)
    assert_close(bits(model), {**bits(base), **weights})
    assert_close(init, bits(base))
    assert_close(logits(model, TEXTS), expected)
    assert (model is peft_model.get_base_model()) == in_place
    if not in_place:
        assert_close(logits(peft_model, TEXTS), expected)
        assert peft_model.base_model.model.model.layers[1].mlp.down_proj.merged == was_merged


def test_only_the_adapted_weights_are_held_twice():
    model, init = merged(adapted(decoder("llama")))
    shared = {name for name, tensor in model.state_dict().items() if tensor.data_ptr() == init[name].data_ptr()}
    assert shared == set(init) - {f"{name}.weight" for name in ADAPTED}


def test_only_adapted_layers_are_edited_and_the_others_are_named():
    base = decoder("llama")
    model, init = merged(adapted(base))
    edit = language_edit(model, PLAIN, init=init)
    assert list(edit.layers) == ADAPTED
    left_out = edit.provenance["notes"]["left_out"]
    assert "fine-tuning left it alone" in left_out["model.layers.0.mlp.down_proj"]
    for name in ADAPTED:
        vector = (model.get_submodule(name).weight - base.get_submodule(name).weight).detach()
        literal = language_edit(model, PLAIN.but(layers=[name]), init=base.state_dict())
        assert_close(edit.layers[name].B, literal.layers[name].B)
        assert edit.layers[name].B.norm() <= vector.norm()
    expected = language_edit(model, PLAIN.but(layers=ADAPTED), init=init)
    assert_close(bits(expected.apply(copy.deepcopy(model), 1.0)), bits(edit.apply(model, 1.0)))


def test_naming_a_layer_that_the_adapter_left_alone_is_an_error():
    model, init = merged(adapted(decoder("llama")))
    with pytest.raises(LayerError, match=r"model\.layers\.0\.mlp\.down_proj have the same weights in init"):
        language_edit(model, PLAIN.but(layers=["model.layers.0.mlp.down_proj", *ADAPTED]), init=init)
    with pytest.raises(InitError, match=r"select those with Recipe\(layers=...\)"):
        language_edit(model, PLAIN.but(layers="re:layers.0"), init=init)


def test_a_trained_copy_of_the_classifier_counts_as_adapted():
    base = hf_vit()
    peft_model = adapted(base, target_modules=["attention.q_proj", "q_proj", "query"], modules_to_save=["classifier"])
    model, init = merged(peft_model)
    assert torch.equal(init["classifier.weight"], base.classifier.weight)
    assert not torch.equal(model.classifier.weight, base.classifier.weight)
    forget, retain = request((3, 8, 8))
    recipe = unmerge.Recipe(skip_layers=0)
    edit = unmerge.fit(model, [forget], [retain], init=init, recipe=recipe)
    assert edit.removed == (0,)
    changed = {name for name, tensor in bits(model).items() if not torch.equal(tensor, init[name])}
    assert {f"{name}.weight" for name in edit.layers} == {name for name in changed if name.endswith("weight")}


def test_a_classifier_that_was_not_trained_can_lose_rows():
    base = hf_vit()
    model, init = merged(adapted(base, target_modules=["attention.q_proj", "q_proj", "query"]))
    forget, retain = request((3, 8, 8))
    edit = unmerge.fit(model, [forget], [retain], init=init, recipe=unmerge.Recipe(skip_layers=0))
    assert edit.removed == (0,)
    assert not edit.layers["classifier"].B.any()
    edit.apply(model)
    assert model.classifier.bias[0] == -1e4


def test_dora_is_merged_as_peft_merges_it():
    peft_model = adapted(decoder("llama"), use_dora=True)
    expected = logits(peft_model, TEXTS)
    model, init = merged(peft_model)
    assert_close(logits(model, TEXTS), expected)
    assert_close(init, bits(decoder("llama")))


def test_a_model_with_adapters_is_refused_where_it_is_not_merged():
    peft_model = adapted(decoder("llama"))
    for model in (peft_model, peft_model.get_base_model()):
        with pytest.raises(LayerError, match=r"from unmerge\.interop\.peft import merged; model, init = merged"):
            language_edit(model, PLAIN)


def test_an_adapter_for_another_base_changes_nothing_and_is_named(tmp_path: Path):
    # Trained on the model without its head, whose layers have other names.
    inner = adapted(decoder("llama").model, target_modules=["v_proj"])
    inner.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        peft_model = PeftModel.from_pretrained(decoder("llama"), tmp_path)
    with pytest.raises(LayerError, match=r"none of the layers .*model\.layers\.0\.self_attn\.v_proj.*another base"):
        merged(peft_model)


def test_layers_that_the_adapter_has_no_values_for_are_named(tmp_path: Path):
    adapted(decoder("llama", blocks=2), target_modules=["v_proj"]).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        peft_model = PeftModel.from_pretrained(decoder("llama"), tmp_path)
    with pytest.warns(UnmergeWarning, match=r"leaves model\.layers\.2\.self_attn\.v_proj as they were"):
        merged(peft_model)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_cannot_be_told_from_the_base_are_refused():
    with pytest.raises(LayerError, match=r"takes a PeftModel, not a LlamaForCausalLM.*PeftModel\.from_pretrained"):
        merged(decoder("llama"))
    with pytest.raises(LayerError, match=r"init_lora_weights='pissa'.*changed the base weights"):
        merged(adapted(decoder("llama", dtype=torch.float32), init_lora_weights="pissa"))
    settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(LayerError, match="type PROMPT_TUNING has no weights"):
        merged(get_peft_model(decoder("llama"), settings))
