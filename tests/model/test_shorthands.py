"""Shorthands for layers against lists written out by hand."""

import pytest
import transformers
from torch import nn

from decoders import decoder
from networks import hf_vit, mlp, resnet50_tree
from unmerge.errors import LayerError
from unmerge.model.selection import select
from unmerge.model.shorthands import blocks_of, is_shorthand

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def llama_layers(blocks, parts):
    return [f"model.layers.{block}.{part}" for block in blocks for part in parts]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize(
    ("entry", "blocks", "parts"),
    [
        ("mlp", range(4), MLP),
        ("attention", range(4), ATTENTION),
        ("last2", (2, 3), ATTENTION + MLP),
        ("mlp:last1", (3,), MLP),
        ("attention:last3", (1, 2, 3), ATTENTION),
        ("last4", range(4), ATTENTION + MLP),
        ("outputs", range(4), ["self_attn.o_proj", "mlp.down_proj"]),
        ("outputs:last2", (2, 3), ["self_attn.o_proj", "mlp.down_proj"]),
    ],
)
def test_a_shorthand_stands_for_the_layers_of_the_blocks(kind, entry, blocks, parts):
    selection = select(decoder(kind, blocks=4), entry)
    assert selection.names == llama_layers(blocks, parts)
    assert not selection.named


def test_gpt2_blocks_are_conv1d_layers():
    model = decoder("gpt2", blocks=2)
    assert select(model, "mlp").names == [
        f"transformer.h.{block}.mlp.{part}" for block in (0, 1) for part in ("c_fc", "c_proj")
    ]
    assert select(model, "attention:last1").names == ["transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj"]


def test_a_vision_transformer_has_blocks_too():
    model = hf_vit()
    attention, rest = set(select(model, "attention").names), set(select(model, "mlp").names)
    assert attention
    assert rest
    assert not attention & rest
    assert all("attention" in name for name in attention)
    assert attention | rest == set(select(model, "last2").names)
    assert "classifier" not in attention | rest


def test_outputs_are_what_a_block_adds_to_its_stream():
    assert select(decoder("gpt2", blocks=1), "outputs").names == [
        "transformer.h.0.attn.c_proj",
        "transformer.h.0.mlp.c_proj",
    ]
    vit = select(hf_vit(), "outputs").names
    assert len(vit) == 4
    assert all(name.endswith(("o_proj", "fc2", "output.dense")) for name in vit)
    experts = select(decoder("mixtral", blocks=1), "outputs").names
    assert experts[0].endswith("o_proj")
    assert len(experts) == 5
    assert all("down_proj[" in name or name.endswith(".w2") for name in experts[1:]), "of every expert"


@pytest.mark.parametrize(
    ("kind", "options", "outputs"),
    [
        ("Phi3", {"pad_token_id": 0}, ["self_attn.o_proj", "mlp.down_proj"]),
        (
            "Qwen2Moe",
            {
                "num_experts": 2,
                "moe_intermediate_size": 10,
                "shared_expert_intermediate_size": 12,
                "decoder_sparse_step": 1,
            },
            ["self_attn.o_proj", "mlp.experts.down_proj[0]", "mlp.experts.down_proj[1]", "mlp.shared_expert.down_proj"],
        ),
    ],
)
def test_outputs_do_not_depend_on_the_order_of_layers(kind, options, outputs):
    """Phi-3 has its output first, the gate of Qwen2-MoE's shared expert stands behind all outputs."""
    sizes = {"hidden_size": 8, "intermediate_size": 14, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(vocab_size=11, num_hidden_layers=1, **sizes, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert select(model, "outputs").names == [f"model.layers.0.{part}" for part in outputs]


def test_outputs_of_two_attentions_in_a_block_and_of_layers_that_share_their_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.ModuleDict({"self": nn.Linear(3, 3), "output": nn.Linear(3, 3)})
            self.cross_attention = nn.ModuleDict({"q": nn.Linear(3, 3), "o": nn.Linear(3, 3)})
            self.intermediate = nn.ModuleDict({"dense": nn.Linear(3, 5)})
            self.output = nn.ModuleDict({"dense": nn.Linear(5, 3)})

    model = nn.ModuleList(Block() for _ in range(2))
    parts = ("attention.output", "cross_attention.o", "output.dense")
    assert select(model, "outputs:last1").names == [f"1.{part}" for part in parts]


def test_shorthands_names_and_patterns_combine():
    model = decoder("llama", blocks=2)
    found = select(model, ["mlp:last1", "lm_head", "re:layers.0.*q_proj"])
    assert found.names == ["model.layers.0.self_attn.q_proj", *llama_layers((1,), MLP), "lm_head"]


def test_a_shorthand_wins_over_a_layer_of_that_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.fc = nn.Linear(3, 3), nn.Linear(3, 3)

    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(2))
    model.mlp = nn.Linear(3, 3)
    assert select(model, "mlp").names == ["blocks.0.fc", "blocks.1.fc"]
    assert select(model, "re:^mlp$").names == ["mlp"]


def test_experts_are_parts_of_a_block_however_many_there_are():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(3, 3)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.Linear(3, 3)
            self.experts = nn.ModuleList(Expert() for _ in range(9))

    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    assert list(blocks_of(model)) == ["layers.0", "layers.1", "layers.2"]
    assert len(select(model, "mlp:last2").names) == 18


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("last0", "last1 to last3"),
        ("mlp:last4", "last1 to last3"),
        ("mlp:last", "transformers also know 'mlp'"),
        ("last4:mlp", "'mlp:last4'"),
    ],
)
def test_a_shorthand_that_does_not_fit_says_what_does(entry, message):
    with pytest.raises(LayerError, match=message):
        select(decoder("llama", blocks=3), entry)


def test_a_network_without_blocks_is_refused_by_name():
    with pytest.raises(LayerError, match="Sequential has no list of alike blocks"):
        select(mlp(), "mlp")


def test_blocks_without_attention_have_no_attention_layers():
    with pytest.raises(LayerError, match=r"selects no editable layer of the 6 blocks 'layer3.0'"):
        select(resnet50_tree(), "attention")


@pytest.mark.parametrize("entry", ["", "mlps", "mlp:", "mlplast2", ":last2", "lastn", "mlp:last2:x"])
def test_other_words_are_no_shorthands(entry):
    assert not is_shorthand(entry)
