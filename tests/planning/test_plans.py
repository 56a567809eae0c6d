"""What a plan says, against sums written out by hand."""

import pytest
import torch

from decoders import decoder, padded, sentences
from networks import convolution_net
from unmerge import Recipe, collect, fit, plan
from unmerge.errors import DataError
from unmerge.planning.costs import Cost
from unmerge.planning.plans import bytes_of, plan_within

SMALL = 10**6


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(5, 5), ("7", 7), ("8GB", 8 * 10**9), ("1.5 MiB", 3 * 2**19), ("2kb", 2000), ("1tb", 10**12), ("4G", None)],
)
def test_memory_is_a_number_or_words(memory, expected):
    if expected is None:
        with pytest.raises(DataError, match="'4G'"):
            bytes_of(memory)
    else:
        assert bytes_of(memory) == expected


@pytest.mark.parametrize("memory", [0, -1, "0GB", "much", 2.5, True, "-3GB", ""])
def test_other_memory_is_refused(memory):
    with pytest.raises(DataError, match="memory="):
        bytes_of(memory)


def costs(*sizes, working=5):
    return [Cost((str(place),), 1, size, size, working=working) for place, size in enumerate(sizes)]


def test_groups_are_in_order_as_few_as_fit_and_filled_evenly():
    found = plan_within(costs(10, 20, 10, 30, 5), memory=45)
    assert [group.layers for group in found.groups] == [["0", "1", "2"], ["3", "4"]]
    assert [group.bytes for group in found.groups] == [45, 40]
    even = plan_within(costs(*[10] * 9), memory=85)
    assert [len(group.costs) for group in even.groups] == [5, 4]
    assert len(plan_within(costs(10, 20, 30), None).groups) == 1


def test_a_layer_that_is_too_large_alone_is_named_with_what_it_needs():
    with pytest.raises(DataError, match=r"too little for layer '1' alone: .* takes 60.00 MB. Pass memory='60MB'"):
        plan_within(costs(SMALL, 55 * SMALL, working=5 * SMALL), 50 * SMALL)


def test_layers_that_share_their_input_are_counted_once_where_data_show_it():
    model, batch = decoder("llama", blocks=2, dtype=torch.float32), padded(sentences((4, 5)))
    blind = plan(model, Recipe(layers="mlp"))
    seen = plan(model, Recipe(layers="mlp"), data=[batch])
    # Forget, retain and the control, 8 inputs of gate and up and 12 of down, float32; sums of the control's 16 groups.
    grams, sums = 2 * 3 * 4 * (8**2 + 12**2), 2 * 16 * 8 * (9 + 13)
    assert sum(cost.reading for group in seen.groups for cost in group.costs) == grams + sums
    more = 2 * 3 * 4 * 8**2 + 2 * 16 * 8 * 9
    assert sum(cost.reading for group in blind.groups for cost in group.costs) == grams + sums + more
    assert blind.groups[0].layers == seen.groups[0].layers


def test_grouped_convolutions_have_one_gram_a_group():
    found = plan(convolution_net("depthwise"), Recipe(layers=["conv"]))
    assert sum(cost.reading for cost in found.groups[0].costs) == 3 * 8 * 4 * 9**2 + 16 * 8 * (4 * 9 + 1)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_model_without_weights_is_planned_like_one_with_them(kind):
    recipe = Recipe(layers="mlp")
    model = decoder(kind)
    assert plan(model.to("meta"), recipe) == plan(decoder(kind), recipe)


def test_a_plan_prints_its_passes():
    model, batch = decoder("llama", blocks=4, dtype=torch.float32), padded(sentences((4, 5)))
    recipe = Recipe(layers="mlp")
    whole = plan(model, recipe, data=[batch])
    halves = plan(model, recipe, whole.bytes - 1, [batch])
    assert len(halves.groups) == 2
    assert halves.bytes < whole.bytes
    text = str(halves)
    assert text.startswith(
        f"2 passes over the data, at most {halves.bytes / 1e6:.2f} MB of {(whole.bytes - 1) / 1e6:.2f}"
    )
    assert "model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj and" in text
    assert [entry["layers"] for entry in halves.to_dict()["passes"]] == [group.layers for group in halves.groups]


@pytest.mark.parametrize("whole", [False, True])
def test_the_class_sums_of_both_sides_are_counted(whole):
    wide, labels = 6, torch.arange(60) % 20
    model, inputs = torch.nn.Linear(wide, 20), torch.randn(60, wide)
    forget, retain = ([(inputs[part], labels[part])] for part in (labels < 2, labels >= 2))
    if whole:
        retain = collect(model, retain)
    recipe = Recipe(layers=[""], basis="lda")
    (cost,) = plan(model, recipe, data=forget, retain=retain).groups[0].costs
    gram, class_sum = 4 * wide**2, 8 * (wide + 1)
    assert cost.solving == 2 * gram + (2 + 18) * class_sum + 4 * wide * wide, "and the directions of the edit"
    assert cost.reading == 3 * gram + (2 + 18 + 18) * class_sum, "and those of the control"
    edit = fit(model, forget, retain, init="zero", recipe=recipe, memory="1MB", on_verdict="ignore")
    (group,) = edit.provenance["plan"]["passes"]
    assert group["bytes"] == cost.solving + cost.working
    held = [collect(model, forget), retain if whole else collect(model, retain)]
    layers = [part[""] for part in held]
    assert cost.solving == 4 * wide * wide + sum(
        part.moments.gram.nbytes + part.class_sums.nbytes + part.class_rows.nbytes for part in layers
    )
