"""Experts that are modules or slices, against loops over their tokens written out here."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu
from transformers import GptOssConfig, GptOssForCausalLM

import unmerge
from decoders import decoder, padded, sentences
from mixtures import WordMixture, texts
from unmerge import Recipe, collect, fit
from unmerge.errors import EditError, LayerError, UnmergeWarning
from unmerge.model.experts import matching_rows, reproduces
from unmerge.model.layers import candidates, layer_of, weight_matrix
from unmerge.model.selection import select

EXPERTS = 4
BLOCK = "model.layers.1.mlp.experts"


def batches(seeds, low=3, high=23, count=6):
    return [padded(sentences(range(4, 4 + count), seed, low, high), extra=1) for seed in seeds]


class Expert(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*size, bias=False) for size in 2 * [(width, inner)] + [(inner, width)]
        )

    def forward(self, hidden):
        return self.down(silu(self.gate(hidden)) * self.up(hidden))


class Mixture(nn.Module):
    """The fused experts' computation with a module for each expert."""

    def __init__(self, fused):
        super().__init__()
        inner = fused.down_proj.shape[2]
        self.experts = nn.ModuleList(Expert(fused.down_proj.shape[1], inner).double() for _ in range(EXPERTS))
        with torch.no_grad():
            for place, expert in enumerate(self.experts):
                expert.gate.weight.copy_(fused.gate_up_proj[place, :inner])
                expert.up.weight.copy_(fused.gate_up_proj[place, inner:])
                expert.down.weight.copy_(fused.down_proj[place])

    def forward(self, hidden, chosen, weights):
        result = torch.zeros_like(hidden)
        for place, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == place)
            if len(token):
                result.index_add_(0, token, expert(hidden[token]) * weights[token, slot, None])
        return result


def with_modules(model):
    for block in model.model.layers:
        block.mlp.experts = Mixture(block.mlp.experts)
    return model.eval()


def routed_tokens(model, data, block=1):
    """For each expert of a block, its counted tokens' inputs and the samples that they are of."""
    rows, owners = [[] for _ in range(EXPERTS)], [[] for _ in range(EXPERTS)]
    seen = []
    experts = model.model.layers[block].mlp.experts
    handle = experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    start = 0
    with torch.no_grad():
        for batch in data:
            model(**{key: value for key, value in batch.items() if key != "group"})
            hidden, chosen, _ = seen.pop()
            mask = batch["attention_mask"]
            for token in range(len(hidden)):
                sample, position = divmod(token, mask.shape[1])
                if mask[sample, position]:
                    for place in chosen[token].tolist():
                        rows[place].append(hidden[token])
                        owners[place].append(start + sample)
            start += len(mask)
    handle.remove()
    return rows, owners


def assert_moments(moments, rows):
    close = {"rtol": 1e-4, "atol": 1e-4} if rows[0].dtype == torch.float32 else {}
    rows = torch.stack(rows).double()
    assert moments.n == len(rows)
    torch.testing.assert_close(moments.mean, rows.mean(0), **close)
    scatter = (rows - rows.mean(0)).T @ (rows - rows.mean(0))
    torch.testing.assert_close(moments.scatter.double(), scatter, **close)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("eager", torch.float64), ("batched_mm", torch.float64), ("grouped_mm", torch.float32)],
)
def test_slices_are_read_with_the_tokens_that_are_routed_to_them(implementation, dtype):
    model, data = decoder("mixtral", dtype=dtype), batches(range(2))
    model.config._experts_implementation = implementation
    found = collect(model, data, "mlp")
    rows, _ = routed_tokens(model, data)
    experts = model.model.layers[1].mlp.experts
    for place in range(EXPERTS):
        assert_moments(found[f"{BLOCK}.gate_up_proj[{place}]"].moments, rows[place])
        with torch.no_grad():
            gate, up = linear(torch.stack(rows[place]), experts.gate_up_proj[place]).chunk(2, dim=-1)
        assert_moments(found[f"{BLOCK}.down_proj[{place}]"].moments, list(silu(gate) * up))


@pytest.mark.parametrize("per_class", ["means", "full"])
def test_routed_tokens_get_the_group_of_their_sample(per_class):
    model, data = decoder("mixtral"), batches(range(2))
    for batch in data:
        batch["group"] = torch.tensor([5, 5, 9, 5, 9, 9])
    name = f"{BLOCK}.gate_up_proj[2]"
    found = collect(model, data, "mlp", per_class=per_class)[name]
    rows, owners = routed_tokens(model, data)
    for place, group in enumerate((5, 9)):
        own = [row for row, owner in zip(rows[2], owners[2], strict=True) if data[0]["group"][owner % 6] == group]
        assert found.class_rows[place] == len(own)
        torch.testing.assert_close(found.class_sums[place], torch.stack(own).sum(0))
        if per_class == "full":
            assert_moments(found.class_moments[place], own)


def test_experts_that_are_modules_are_read_like_slices():
    fused, modules = decoder("mixtral"), with_modules(decoder("mixtral"))
    data = batches(range(2))
    for batch in data:
        batch["group"] = torch.tensor([5, 5, 9, 5, 9, 9])
    expected, found = collect(fused, data, "mlp"), collect(modules, data, "mlp")
    for place in range(EXPERTS):
        for theirs, mine in (("gate_up_proj", "gate"), ("gate_up_proj", "up"), ("down_proj", "down")):
            one = expected[f"{BLOCK}.{theirs}[{place}]"]
            other = found[f"{BLOCK}.experts.{place}.{mine}"]
            assert one.moments.n == other.moments.n
            torch.testing.assert_close(one.moments.scatter, other.moments.scatter)
            torch.testing.assert_close(one.class_sums, other.class_sums)


def test_rows_are_found_again_and_equal_ones_in_their_order():
    everything = torch.tensor([[1.0, 2], [3, 4], [1, 2], [5, 6], [1, 2]])
    assert matching_rows(everything[[3, 0, 2, 4]], everything).tolist() == [3, 0, 2, 4]
    assert matching_rows(everything[[1]] + 1e-6, everything) is None
    assert matching_rows(everything[:0], everything).tolist() == []


def test_a_slice_is_a_layer_with_a_weight_of_its_own():
    model = decoder("mixtral", blocks=2)
    names = [f"{BLOCK}.{part}[{place}]" for part in ("gate_up_proj", "down_proj") for place in range(EXPERTS)]
    assert [name for name in candidates(model) if name.startswith(BLOCK)] == names
    assert set(names) <= set(select(model, "mlp:last1").names)
    layer = layer_of(model, names[5])
    assert torch.equal(weight_matrix(layer), model.model.layers[1].mlp.experts.down_proj[1])
    assert list(model.state_dict()) == list(decoder("mixtral", blocks=2).state_dict())
    with pytest.raises(LayerError, match="there is no editable layer"):
        select(model, f"{BLOCK}.down_proj[4]")


def test_an_edit_of_slices_is_applied_saved_reverted_and_leaves_the_other_experts(tmp_path):
    model = decoder("mixtral")
    forget, retain = batches(range(3), 3, 10), batches(range(10, 14), 8)
    names = [f"{BLOCK}.gate_up_proj[1]", f"{BLOCK}.down_proj[1]", f"{BLOCK}.down_proj[3]"]
    recipe = Recipe(layers=names, rank=3, retain_rank=3)
    edit = fit(model, forget, retain, init="zero", recipe=recipe, on_verdict="ignore")
    assert list(edit.layers) == names
    before = {name: value.clone() for name, value in model.state_dict().items()}
    edit.save(tmp_path)
    unmerge.Edit.load(tmp_path).apply(decoder("mixtral"), alpha=0.5)
    edit.apply(model, alpha=0.5)
    experts = model.model.layers[1].mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        expected = before[f"{BLOCK}.{part}"].clone()
        for place in range(EXPERTS):
            layer = edit.layers.get(f"{BLOCK}.{part}[{place}]")
            if layer is not None:
                expected[place] -= 0.5 * layer.B @ layer.Q.T
        torch.testing.assert_close(getattr(experts, part).detach(), expected, rtol=0, atol=1e-12)
        assert torch.equal(getattr(experts, part)[0], before[f"{BLOCK}.{part}"][0])
    assert all(share == pytest.approx(1) for share in edit.survived(decoder("mixtral"), 0.5).values())
    edit.revert(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(EditError, match="a weight of several experts"):
        edit.to_peft(tmp_path / "adapter", alpha=1.0, base=model)


def test_experts_that_are_stored_as_in_by_out_with_biases():
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=23, hidden_size=16, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=1, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=32,
        layer_types=["full_attention"], rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    forget, retain = batches(range(3), 3, 10), batches(range(10, 14), 8)
    name = "model.layers.0.mlp.experts.gate_up_proj[1]"
    recipe = Recipe(layers=name, rank=3, retain_rank=3)
    edit = fit(model, forget, retain, init="zero", recipe=recipe, on_verdict="ignore")
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    before, layer = weight.detach().clone(), edit.layers[name]
    assert layer.B.shape == (24, 3)
    edit.apply(model, alpha=1.0)
    torch.testing.assert_close(weight[1].detach(), before[1] - (layer.B @ layer.Q.T).T)
    assert torch.equal(weight[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize("as_modules", [False, True])
@pytest.mark.filterwarnings("ignore:rank=.*:unmerge.errors.UnmergeWarning")
def test_experts_that_see_few_tokens_are_left_alone(as_modules):
    model = decoder("mixtral", blocks=2)
    with torch.no_grad():  # nothing is routed to expert 2 of the last block
        gate = model.model.layers[1].mlp.gate
        gate.weight[2] = 0
        gate.weight[[0, 1, 3]] += 10 * torch.eye(8)[[0, 0, 0]].double().abs()
        model.model.layers[1].post_attention_layernorm.weight.copy_(torch.eye(8)[0] + 0.1)
    model.model.layers[1].mlp.gate.register_forward_hook(without_expert_two)
    if as_modules:
        model = with_modules(model)
    forget, retain = batches(range(3), 3, 10), batches(range(10, 14), 8)
    with pytest.warns(UnmergeWarning, match="never called|left alone"):
        edit = fit(
            model, forget, retain, init="zero", recipe=Recipe(layers="mlp", rank=2, retain_rank=2), on_verdict="ignore"
        )
    gone = f"{BLOCK}.experts.2." if as_modules else "[2]"
    in_block = [name for name in edit.layers if name.startswith(BLOCK)]
    assert in_block
    assert not any(gone in name for name in in_block)
    left_out = [name for name in edit.provenance["notes"]["left_out"] if name.startswith(BLOCK) and gone in name]
    assert len(left_out) == (3 if as_modules else 2)


def without_expert_two(module, args, output):
    logits, weights, chosen = output
    other = torch.where(chosen == 2, torch.tensor(0), chosen)
    other = torch.where((other == other.flip(-1)) & (torch.arange(2) == 1), torch.tensor(1), other)
    return logits, weights, torch.where(other[:, :1] == other[:, 1:], torch.tensor([[0, 1]]), other)


@pytest.mark.filterwarnings("ignore:left out:unmerge.errors.UnmergeWarning")
def test_experts_that_saw_fewer_tokens_than_the_recipe_needs_are_named():
    model = decoder("mixtral", blocks=1)
    forget, retain = batches([0], 3, 6, count=2), batches(range(10, 16), 8)
    recipe = Recipe(layers="mlp", rank=1, retain_rank=2)
    counts = {name: layer.moments.n for name, layer in collect(model, forget, "mlp").layers.items()}
    few = {name for name, count in counts.items() if count < 8}
    assert 0 < len(few) < len(counts)
    with pytest.warns(UnmergeWarning, match="left alone: they saw fewer than 8 forget or retain tokens"):
        edit = fit(model, forget, retain, init="zero", recipe=recipe, on_verdict="ignore")
    assert not few & set(edit.layers)
    assert edit.provenance["notes"]["spanned_by_retain"] == []
    assert all("saw fewer than 8" in edit.provenance["notes"]["left_out"][name] for name in few)


def test_experts_that_do_something_of_their_own_are_left_out():
    model = decoder("mixtral", blocks=1)
    experts = model.model.layers[0].mlp.experts
    plain = experts.forward
    experts.forward = lambda *args: plain(*args) + 1
    with pytest.warns(UnmergeWarning, match="does not return input"):
        found = collect(model, batches([0]), "last1")
    assert not any("experts" in name for name in found.layers)
    with pytest.raises(LayerError, match="does something of its own"):
        collect(model, batches([0]), "model.layers.0.mlp.experts.down_proj[0]")
    assert not reproduces(experts, (torch.zeros(3, 8),), {}, torch.zeros(3, 8))


def test_parts_of_a_mixture_equal_the_whole():
    model = decoder("mixtral")
    forget, retain = batches(range(3), 3, 10), batches(range(10, 14), 8)
    recipe = Recipe(layers="mlp", rank=2, retain_rank=2)
    options = {"init": "zero", "recipe": recipe, "on_verdict": "ignore"}
    expected, found = fit(model, forget, retain, **options), fit(model, forget, retain, memory=226_000, **options)
    assert len(found.provenance["plan"]["passes"]) > 2
    assert found.layers.keys() == expected.layers.keys()
    for name, layer in expected.layers.items():
        torch.testing.assert_close(found.layers[name].B @ found.layers[name].Q.T, layer.B @ layer.Q.T)


@pytest.mark.parametrize("known_by", ["group", "mask"])
def test_experts_whose_tokens_cannot_be_followed_get_no_labels_and_no_mask(known_by):
    data = texts([0], 2, padded=known_by == "mask")  # all tokens of a batch: their number divides by the samples
    if known_by == "group":
        for batch in data:
            batch["group"] = torch.arange(8)
    layers = "re:experts.0|head"
    with pytest.warns(UnmergeWarning, match=r"'routing.experts.0.up', 'routing.experts.0.down' is an expert's whose"):
        found = collect(WordMixture(scale=2.0), data, layers)
    assert list(found.layers) == ["head"]
    with pytest.raises(LayerError, match=r"'routing.experts.0.up' is an expert's whose inputs are not among those"):
        collect(WordMixture(scale=2.0), data, ["routing.experts.0.up"])
    assert len(collect(WordMixture(), data, layers).layers) == 3, "as they are, they are followed"


def test_experts_whose_tokens_cannot_be_followed_are_read_where_no_row_is_told_apart():
    model, data = WordMixture(scale=2.0), texts([0, 1], 2, padded=False)
    words = torch.cat([batch["input_ids"].flatten() for batch in data])
    rows = 2 * model.words(words[words < 10]).detach()
    assert_moments(collect(model, data, "re:experts.0.up")["routing.experts.0.up"].moments, list(rows))


def test_an_expert_that_is_called_without_a_token_has_none():
    data = [*texts([0], 1), *texts([1], 1)]
    for batch in data:
        batch["group"] = torch.arange(8)
    expected, found = (
        collect(WordMixture(calls_all=calls_all), data, "re:experts.[01]") for calls_all in (False, True)
    )
    assert list(found.layers) == list(expected.layers)
    for name, layer in expected.layers.items():
        torch.testing.assert_close(found[name].class_sums, layer.class_sums)
        assert found[name].moments.n == layer.moments.n == 80
