"""A request in parts equals the request at once, and takes no more than it says."""

import pytest
import torch

import networks
import unmerge
from decoders import decoder, padded, sentences
from mixtures import WordMixture, texts
from unmerge import Recipe, collect, fit
from unmerge.errors import DataError, LayerError
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint

NARROW = {"rank": 3, "retain_rank": 3, "layers": "last4", "deflate": 4}


def data(labelled=False):
    """Forget and retain batches whose words come from different halves of the vocabulary."""
    forget = [padded(sentences((5, 6, 4), seed, 3, 12)) for seed in range(3)]
    retain = [padded(sentences((6, 4, 7, 5), 10 + seed, 9, 23)) for seed in range(5)]
    if labelled:
        for place, batch in enumerate([*forget, *retain]):
            batch["group"] = torch.arange(len(batch["input_ids"])) + (0 if place < 3 else 7)
    return forget, retain


def smallest(model, recipe, forget, retain):
    """A bound that needs several passes: what the largest layer takes alone."""
    (group,) = unmerge.plan(model, recipe, data=forget, retain=retain).groups
    return max(cost.bytes for cost in group.costs)


def assert_same(found, expected):
    assert found.layers.keys() == expected.layers.keys()
    for name, layer in expected.layers.items():
        other = found.layers[name]
        torch.testing.assert_close(other.B @ other.Q.T, layer.B @ layer.Q.T)
        if layer.shift is not None:
            torch.testing.assert_close(other.shift, layer.shift)
    assert found.weights == expected.weights
    assert found.head == expected.head
    skipped = ("seconds", "plan")
    for key, value in expected.provenance.items():
        if key not in skipped:
            assert found.provenance[key] == value, key


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
@pytest.mark.parametrize(
    ("basis", "labelled", "options"),
    [
        ("auto", False, {}),
        ("auto", True, {}),
        ("deflated-pca", False, {}),
        ("lda", True, {}),
        ("cav-class", True, {}),
        ("cav-class", True, {"max_points": 30}),
        ("cav-kmeans", False, {}),
        ("contrastive", False, {"head": "keep", "layers": ["last4", "lm_head"]}),
        ("contrastive", False, {"layers": None}),
        ("wiener", False, {"layers": None}),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_edit_in_parts_is_the_edit_at_once(kind, basis, labelled, options):
    model, (forget, retain) = decoder(kind, blocks=4), data(labelled)
    recipe = Recipe(basis=basis, **(NARROW | options))
    init = decoder(kind, blocks=4, seed=1).state_dict()
    before = fingerprint(state_of(model))
    expected = fit(model, forget, retain, init=init, recipe=recipe, check_init=False)
    memory = smallest(model, recipe, forget, retain)
    found = fit(model, forget, retain, init=init, recipe=recipe, check_init=False, memory=memory)
    assert len(found.provenance["plan"]["passes"]) > 1
    assert found.provenance["plan"]["bytes"] <= memory
    assert_same(found, expected)
    assert fingerprint(state_of(model)) == before
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("head", ["remove", "edit"])
def test_convolutions_in_parts_have_the_strengths_of_all_and_the_classifier_its_rows(head):
    model = networks.cnn(classes=5)
    forget, retain = ([part] for part in networks.request((3, 6, 6), forgotten=(1,), kept=(0, 2, 3, 4), each=9))
    recipe = Recipe(skip_layers=0, early_strength=0.0, head=head)
    expected = fit(model, forget, retain, init="zero", recipe=recipe)
    found = fit(model, forget, retain, init="zero", recipe=recipe, memory=smallest(model, recipe, forget, retain))
    assert len(found.provenance["plan"]["passes"]) > 1
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
def test_statistics_that_are_there_are_used_in_parts_too():
    model, (forget, retain) = decoder("llama", blocks=4), data(labelled=True)
    recipe = Recipe(**NARROW)
    memory = smallest(model, recipe, forget, retain)
    everything = collect(model, [*forget, *retain], "last4")
    part = collect(model, forget, everything)
    expected = fit(model, part, everything - part, init="zero", recipe=recipe)
    assert_same(fit(model, part, everything - part, init="zero", recipe=recipe, memory=memory), expected)
    mixed = fit(model, forget, everything - part, init="zero", recipe=recipe, memory=memory)
    torch.testing.assert_close(
        [layer.B @ layer.Q.T for layer in mixed.layers.values()],
        [layer.B @ layer.Q.T for layer in expected.layers.values()],
    )
    by_class = {"classes": [0, 1, 2], "statistics": everything, "init": "zero", "recipe": recipe.but(basis="lda")}
    assert_same(fit(model, **by_class, memory=memory), fit(model, **by_class))


def test_every_part_reads_the_data_once_and_stops_behind_its_last_block():
    model, (forget, retain) = decoder("llama", blocks=4), data()
    recipe = Recipe(**NARROW)
    memory = smallest(model, recipe, forget, retain)
    calls = dict.fromkeys(("model.layers.0", "model.layers.3", "lm_head"), 0)
    for name in calls:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    edit = fit(model, forget, retain, init="zero", recipe=recipe, memory=memory, on_verdict="ignore")
    passes = len(edit.provenance["plan"]["passes"])
    assert passes >= 4
    # Every batch once a pass, and the few samples that are looked at first, and one of them alone.
    assert calls["model.layers.0"] == passes * 8 + 2
    # The whole network only in the first look and for the first batch of forget and of retain.
    assert calls["lm_head"] == passes * 2 + 2
    assert calls["lm_head"] < calls["model.layers.3"] < calls["model.layers.0"]


def test_a_one_shot_iterator_cannot_be_read_in_parts():
    model, (forget, retain) = decoder("llama"), data()
    with pytest.raises(DataError, match=r"retain is a one-shot iterator .* memory="):
        fit(model, forget, iter(retain), init="zero", memory="1GB")
    with pytest.raises(DataError, match=r"collect is a one-shot iterator .* memory="):
        collect(model, iter(retain), memory="1GB")


def test_too_little_memory_says_how_much_is_needed():
    model, (forget, retain) = decoder("llama"), data()
    with pytest.raises(
        DataError,
        match=r"memory=1000 bytes is too little for layer 'model.layers.2.*' alone.*Pass memory='.*MB' or more",
    ):
        fit(model, forget, retain, init="zero", memory="1KB")


def test_collect_within_memory_keeps_the_statistics_or_says_that_they_do_not_fit():
    model, (forget, _) = decoder("llama"), data(labelled=True)
    whole = collect(model, forget, "mlp")
    found = collect(model, forget, "mlp", memory="1MB")
    assert found.layers.keys() == whole.layers.keys()
    assert found.classes == whole.classes
    for name, layer in whole.layers.items():
        torch.testing.assert_close(found[name].moments.scatter, layer.moments.scatter)
    with pytest.raises(DataError, match="on the CPU there is nowhere else to keep them"):
        collect(model, forget, "mlp", memory="3KB")


OF_EXPERTS = Recipe(layers="re:experts", rank=2, retain_rank=2)


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
@pytest.mark.parametrize("reached", [[0, 1], [1, 2]])
@pytest.mark.parametrize("few", [False, True])
def test_a_part_that_no_token_or_too_few_reach_is_left_out_as_at_once(reached, few):
    model, forget, retain = WordMixture(), texts(reached, 3), texts(reached, 5, seed=1)
    missed = next(iter({0, 1, 2} - set(reached)))
    if few:
        for data in (forget, retain):
            data[0]["input_ids"][0, 0] = 10 * missed
    expected = fit(model, forget, retain, init="zero", recipe=OF_EXPERTS)
    memory = smallest(model, OF_EXPERTS, forget, retain)
    found = fit(model, forget, retain, init="zero", recipe=OF_EXPERTS, memory=memory)
    assert len(found.provenance["plan"]["passes"]) == 6, "one for each layer"
    assert_same(found, expected)
    left_out = found.provenance["notes"]["left_out"]
    assert set(left_out) == {f"routing.experts.{missed}.{part}" for part in ("up", "down")}


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
@pytest.mark.parametrize(("expert", "why"), [(0, "was never called"), (2, "saw fewer than 400")])
@pytest.mark.parametrize("memory", [None, "10MB"])
def test_a_request_that_reaches_no_layer_says_why(memory, expert, why):
    recipe = OF_EXPERTS.but(layers="re:experts.2", rank=100)
    forget, retain = texts([expert], 2), texts([expert], 2, seed=1)
    with pytest.raises(LayerError, match=rf"no selected layer is left to .*'routing.experts.2.up'.* {why}"):
        fit(WordMixture(), forget, retain, init="zero", recipe=recipe, memory=memory)
