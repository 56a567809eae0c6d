"""A layer whose Gram is too large is planned and read as a sketch that fits, and takes no more than the plan says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unmerge
from decoders import decoder, padded, sentences
from unmerge import Recipe, Statistics, collect, fit, plan
from unmerge.errors import DataError
from unmerge.planning.costs import Grams, costs_of, grams_of

WIDE = 2048
RECIPE = Recipe(layers=["1"], basis="pca", head="edit")


def wide_model(width=WIDE):
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Linear(width, 6))


def wide_data(width=WIDE):
    torch.manual_seed(1)
    frame = torch.randn(24, width)
    forget = [torch.randn(40, 24) @ frame + frame[0] for _ in range(3)]
    return forget, [torch.randn(60, 24) @ frame.flip(1) for _ in range(4)]


def test_a_sketch_stands_for_a_gram_that_is_too_large():
    model = wide_model()
    (exact,) = plan(model, RECIPE).groups[0].costs
    assert exact.sketch is None
    assert plan(model, RECIPE, exact.bytes).sketches == {}
    found = plan(model, RECIPE, exact.bytes - 1)
    assert found.sketches == {"1": WIDE // 4}, "more would cost as much as the Gram"
    sizes = [plan(model, RECIPE, memory).sketches["1"] for memory in ("60MB", "40MB", "20MB", "10MB")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    for memory, size in zip(("60MB", "40MB", "20MB", "10MB"), sizes, strict=True):
        (group,) = plan(model, RECIPE, memory).groups
        (cost,) = group.costs
        assert cost.bytes <= int(memory[:2]) * 10**6
        # Forget, retain, control and the signs; the diagonals and 16 class sums of the control's groups.
        assert cost.reading == 4 * 4 * WIDE * size + 3 * 8 * WIDE + 16 * 8 * (WIDE + 1)
    text = str(plan(model, RECIPE, "20MB"))
    assert "widest input  sketch  statistics" in text
    assert f"{WIDE}     {sizes[2]}" in text
    assert plan(model, RECIPE, "20MB").to_dict()["sketches"] == {"1": sizes[2]}


def test_a_sketch_holds_what_the_recipe_asks_for_or_is_refused():
    model = wide_model()
    with pytest.raises(
        DataError, match=r"layer '1' alone: with 2048 inputs it takes .* even as the smallest sketch \(size 32\)"
    ):
        plan(model, RECIPE, "2MB")
    deep = RECIPE.but(basis="deflated-pca", deflate=300)
    with pytest.raises(DataError, match=r"smallest sketch \(size 316\)"):
        plan(model, deep, "10MB")
    # A sketch of 1040 columns would be no smaller than the Gram.
    with pytest.raises(DataError, match=r"it takes 0.\d\d GB. Pass"):
        plan(model, RECIPE.but(basis="deflated-pca", deflate=1024), "50MB")


def test_what_is_known_of_a_layer_is_not_planned_to_be_more():
    model, grams = wide_model(), Grams(3, 2)
    for memory, expected in ((None, {90}), (10**9, {90}), (8 * 10**6, range(33, 90))):
        (cost,) = costs_of(model, ["1"], {}, grams, RECIPE, 0, memory, {"1": 90})
        assert cost.sketch in expected


@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 0)])
def test_on_the_cpu_the_sums_of_the_pass_that_is_read_are_wider(dtype, more):
    model, recipe = wide_model().to(dtype), RECIPE.but(basis="cav-class", max_points=None)
    grams = grams_of(recipe, 3, 5, with_verdict=True)
    (cost,) = costs_of(model, ["1"], {}, grams, recipe, 3)
    square, kept = WIDE**2, max(4, dtype.itemsize)
    assert cost.counting == 4 * more * square, "of three classes and of all"
    assert cost.settling == (kept * square if more else 0)
    (alone,) = costs_of(model, ["1"], {}, Grams(4, counting=4))
    assert alone.bytes == 4 * 8 * square + cost.settling
    (elsewhere,) = costs_of(model.to("meta"), ["1"], {}, grams, recipe, 3)
    assert elsewhere.counting == elsewhere.settling == 0


@pytest.mark.parametrize("knob", ["rank", "retain_rank"])
def test_so_many_directions_that_all_eigenvectors_are_found_take_more(knob):
    model, most = wide_model(), WIDE // 4

    def working(count):
        return costs_of(model, ["1"], {}, Grams(3, 2), RECIPE.but(**{knob: count}))[0].working

    few, many = working(most), working(most + 1)
    assert many - few > 10 * WIDE**2
    model.to("meta")  # as a GPU, which may find all of them for few directions too
    assert working(most) - few > 10 * WIDE**2


@pytest.mark.parametrize("ways", ["data", "statistics", "sketches", "mixed"])
def test_data_and_statistics_give_the_same_sketched_edit(ways):
    model, (forget, retain) = wide_model(), wide_data()
    expected = fit(model, forget, retain, init="zero", recipe=RECIPE, on_verdict="ignore")
    first, second = forget, retain
    if ways != "data":
        second = collect(model, retain, ["1"])
    if ways in ("statistics", "sketches"):
        first = collect(model, forget, second)
    if ways == "sketches":
        second = second.sketched({"1": 400})
    found = fit(model, first, second, init="zero", recipe=RECIPE, on_verdict="ignore", memory="20MB")
    assert found.provenance["plan"]["sketches"]["1"] == found.provenance["notes"]["sketches"]["1"]["size"] < 400
    assert found.provenance["plan"]["bytes"] <= 20 * 10**6
    mine, theirs = ((edit.layers["1"].B @ edit.layers["1"].Q.mT) for edit in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_collect_sketches_what_does_not_fit(tmp_path):
    model, (forget, retain) = wide_model(), wide_data()
    found = collect(model, forget, ["1"], memory="3MB")
    assert 64 <= found.sketches["1"] < WIDE // 4
    again = collect(model, retain, found)
    assert again.sketches == found.sketches
    found.save(tmp_path / "some.safetensors")
    edit = fit(model, Statistics.load(tmp_path / "some.safetensors"), again, init="zero", recipe=RECIPE)
    exact = fit(model, forget, retain, init="zero", recipe=RECIPE)
    mine, theirs = ((one.layers["1"].B @ one.layers["1"].Q.mT) for one in (edit, exact))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    with pytest.raises(DataError, match=r"even as the smallest sketch \(size 64\)"):
        collect(model, forget, ["1"], memory="100KB")


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_wide_layers_of_a_llama_are_sketched_and_the_others_are_not(dtype):
    model = decoder("llama", blocks=2, dtype=dtype, hidden_size=32, intermediate_size=512)
    forget = [padded(sentences((9, 12, 10, 7), seed, 3, 12)) for seed in range(8)]
    retain = [padded(sentences((12, 9, 8, 11), 20 + seed, 9, 23)) for seed in range(16)]
    recipe = Recipe(layers="mlp", basis="pca", rank=8, retain_rank=8)
    exact = fit(model, forget, retain, init="zero", recipe=recipe)
    found = fit(model, forget, retain, init="zero", recipe=recipe, memory="9MB")
    wide = [f"model.layers.{block}.mlp.down_proj" for block in (0, 1)]
    assert list(found.provenance["plan"]["sketches"]) == wide
    assert len(found.provenance["plan"]["passes"]) > 1
    moments = collect(model, forget, "mlp")
    for name, layer in exact.layers.items():
        scatter = moments[name].moments.scatter.double()
        mine, theirs = ((q * (scatter @ q)).sum() for q in (found.layers[name].Q.double(), layer.Q.double()))
        assert 0.99 < mine / theirs < 1.001
        if name not in wide:
            torch.testing.assert_close(found.layers[name].B, layer.B)
    assert found.provenance["verdict"]["kind"] == exact.provenance["verdict"]["kind"]


PEAK = """
import torch, unmerge
from test_costs import RECIPE, wide_data, wide_model
from unmerge.bench.memory import peak_of

model, (forget, retain), cpu = wide_model(8192), wide_data(8192), torch.device("cpu")
unmerge.fit(wide_model(), *wide_data(), init="zero", recipe=RECIPE, memory="8MB")  # the libraries' own
plan = unmerge.plan(model, RECIPE, "100MB", forget)
with peak_of(cpu) as peak:
    edit = unmerge.fit(model, forget, retain, init="zero", recipe=RECIPE, memory="100MB")
print(edit.provenance["notes"]["sketches"]["1"]["size"], plan.bytes, peak[0])
"""


MEANS = """
import sys, torch, unmerge
from torch import nn
from unmerge import Recipe
from unmerge.bench.memory import peak_of
from unmerge.planning.costs import costs_of, grams_of

def request(width, classes):
    torch.manual_seed(0)
    model, labels = nn.Sequential(nn.Identity(), nn.Linear(width, 4)).eval(), torch.arange(width + 500) % classes
    rows = torch.randn(len(labels), width) + torch.randn(classes, width)[labels]
    whole = unmerge.collect(model, [(rows, labels)])
    return model, whole, unmerge.collect(model, [(rows[labels == 0], labels[labels == 0])], whole)

width, classes = 1200, int(sys.argv[1])
recipe = Recipe(basis=sys.argv[2], layers=["1"], head="edit")
for size in (100, width):  # the first makes what the libraries keep
    model, whole, part = request(size, min(classes, size // 2 if size == 100 else classes))
    retain = whole - part
    retain.parts = None  # as from two passes
    with peak_of(torch.device("cpu")) as peak:
        unmerge.fit(model, part, retain, init="zero", recipe=recipe, on_verdict="ignore")
(cost,) = costs_of(model, ["1"], {}, grams_of(recipe, 1, classes - 1, False), recipe, 1)
print(cost.working, peak[0])
"""


def measured(script, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "100000"}
    paths = [Path(unmerge.__file__).parents[1], *Path(__file__).parents[:2]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


needs_proc = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is measured by way of /proc"
)


@needs_proc
@pytest.mark.parametrize(("classes", "basis"), [(1201, "blend"), (900, "blend"), (1150, "private-mean")])
def test_bases_of_nearly_as_many_means_as_features_take_no_more_than_is_planned(classes, basis):
    said, taken = measured(MEANS, str(classes), basis)
    assert 0.6 * said < taken < said


@needs_proc
def test_a_sketched_layer_takes_no_more_than_its_bound():
    size, said, taken = measured(PEAK)
    assert size > 150
    assert said <= 100 * 10**6 < 8192**2 * 4, "the Gram alone would take more than twice as much"
    in_flight = 12 * 10**6  # the rows of a batch in float64 and pieces of blocks
    assert 0.5 * said < taken < said + in_flight
