"""diagnose(): every number of every kind of layer equals what all activations give, computed directly in float64."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import reference
import unmerge
from networks import Batch, batched, request
from unmerge import Diagnosis, Recipe
from unmerge.bench.digits import load_digits, train
from unmerge.data.chosen import ChosenSamples
from unmerge.diagnosing.diagnosis import LayerDiagnosis
from unmerge.errors import DataError, InitError, StatisticsError, UnmergeWarning
from unmerge.recipe import BASES

# The model, the shape of its inputs, and the layer that is looked at.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: networks.mlp((20, 9, 4)), (20,), "0"),
    "head": (lambda: networks.mlp((7, 12, 4)), (7,), "2"),
    "convolution": (lambda: networks.cnn(), (3, 6, 6), "conv2"),
    "groups": (lambda: networks.convolution_net("groups"), (4, 6, 7), "conv"),
    "depthwise": (lambda: networks.convolution_net("depthwise"), (4, 6, 7), "conv"),
    "conv1d": (lambda: networks.conv1d_net(9, 6, 4), (9,), "0"),
}
SOLVED = ("lda", "cav-class", "contrastive", "pca", "deflated-pca")


def small(basis: str = "lda", **knobs: Any) -> Recipe:
    return Recipe(basis=basis, **({"rank": 2, "retain_rank": 3, "deflate": 2, "gamma": 0.3, "skip_layers": 0} | knobs))


def given_init(model: nn.Module) -> dict[str, Tensor]:
    """Weights that the model may have been fine-tuned from."""
    other, own = networks.ready(copy.deepcopy(model), seed=77).state_dict(), model.state_dict()
    return {name: (own[name] + value) / 2 if value.is_floating_point() else value for name, value in other.items()}


def operator_norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def general_bound(matrix: Tensor, rows: Tensor, basis: Tensor) -> Tensor:
    """2 ν₁ ‖A P‖² + 2 ‖(I − P) Σ (I − P)‖ ‖A‖²: the remark on bases that are not eigenbases, from all rows."""
    moment = rows.T @ rows / len(rows)
    outside = torch.eye(len(moment), dtype=torch.float64) - basis @ basis.T
    inside = operator_norm(moment) * (matrix @ basis @ basis.T).square().sum()
    return 2 * inside + 2 * operator_norm(outside @ moment @ outside) * matrix.square().sum()


def spectrum(rows: Tensor) -> list[float]:
    """The leading eigenvalues of the centred covariance as shares of their sum."""
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    values = torch.cat([values, values.new_zeros(max(0, rows.shape[1] - len(values)))])
    return (values / values.sum())[: min(32, rows.shape[1])].tolist()


def effective_rank(rows: Tensor) -> Tensor:
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    return values.sum() ** 2 / values.square().sum()


def direct(
    model: nn.Module,
    name: str,
    forget: Batch,
    retain: Batch,
    recipe: Recipe,
    alpha: float,
    init: Mapping[str, Tensor] | None,
) -> dict[str, Any]:
    """What a diagnosis says of one layer, from the rows that the layer receives."""
    module = model.get_submodule(name)
    lost, kept = (reference.layer_inputs(model, [name], *part)[name].groups for part in (forget, retain))
    layer = reference.unmerge(model, [name], forget, retain, recipe, init)[name]
    start = torch.zeros_like(module.weight) if init is None else init[f"{name}.weight"]
    vectors = reference.matrices(module, module.weight.detach().double() - start.double())
    has_solver = recipe.basis != "private-mean"
    averaged: dict[str, list[Tensor]] = {}
    lists: dict[str, list[float]] = {"overlaps": [], "cosines": [], "gains": []}
    for group, (f, r, vector) in enumerate(zip(lost, kept, vectors, strict=True)):
        task, basis = layer.forget_task[group], layer.forget_basis[group]
        span = layer.retain_basis[group] if has_solver else reference.pca_basis(r, recipe.retain_rank)
        rank = min(16, max(1, f.shape[1] // 4))
        energies = torch.linalg.svdvals(f).square()
        cosines = torch.linalg.svdvals(basis.T @ span)
        leading, others = (reference.pca_basis(rows, rank) for rows in (f, r))
        lists["overlaps"] += [(span @ (span.T @ direction)).norm().item() for direction in basis.T]
        lists["cosines"] += cosines.tolist()
        gains = [1 / (1 + recipe.gamma + recipe.lam * cosine**2) for cosine in cosines.tolist()]
        lists["gains"] += gains if has_solver else []
        numbers = {
            "captured": ((f - f.mean(0)) @ basis).square().sum() / (f - f.mean(0)).square().sum(),
            "separability.captured": ((f - f.mean(0)) @ leading).square().sum() / (f - f.mean(0)).square().sum(),
            "separability.overlap": torch.stack([(others.T @ direction).norm() for direction in leading.T]).mean(),
            "forget_rank": effective_rank(f),
            "retain_rank": effective_rank(r),
            "tail_energy": energies[rank:].sum() / energies.sum(),
            "forget_response": (f @ (vector - alpha * task).T).square().sum(1).mean(),
            "forget_bound": general_bound(vector - alpha * task, f, basis),
            "retain_response": (r @ (alpha * task).T).square().sum(1).mean(),
            "retain_bound": alpha**2 * general_bound(task, r, span),
            "mean_shift": (f.mean(0) - r.mean(0)).square().sum() / (r - r.mean(0)).square().sum(1).mean(),
        }
        for key, value in numbers.items():
            averaged.setdefault(key, []).append(value)
    means = {key: torch.stack(values).mean().item() for key, values in averaged.items()}
    return {
        "features": lost[0].shape[1],
        "task_vector_norm": torch.stack(vectors).norm().item(),
        "weight_norm": module.weight.detach().double().norm().item(),
        "forget_spectrum": spectrum(lost[0]),
        "retain_spectrum": spectrum(kept[0]),
        **lists,
        **means,
    }


def agrees(found: LayerDiagnosis, expected: dict[str, Any], tolerance: float) -> None:
    if not expected["gains"]:  # a closed form has a span of its own, but its directions within it are any
        squares = [sum(value**2 for value in values) for values in (found.overlaps, expected.pop("overlaps"))]
        assert squares[0] == pytest.approx(squares[1], rel=tolerance)
    for key, value in expected.items():
        assert attrgetter(key)(found) == pytest.approx(value, rel=tolerance, abs=tolerance / 10), key


@pytest.mark.parametrize("init", ["zero", "given"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("basis", ["lda", "pca", "private-mean"])
def test_every_number_of_every_kind_of_layer_is_that_of_all_rows(kind: str, basis: str, init: str) -> None:
    build, shape, name = KINDS[kind]
    model = build()
    forget, retain = request(shape, forgotten=(0, 1), kept=(2, 3), each=8)
    recipe, start = small(basis), given_init(model) if init == "given" else None
    found = unmerge.diagnose(
        batched(forget, 5), batched(retain, 7), model, start or "zero", recipe=recipe, alpha=1.3
    ).layers[name]
    agrees(found, direct(model, name, forget, retain, recipe, 1.3, start), 1e-6)
    assert found.forget_response <= found.forget_bound * (1 + 1e-9)
    assert found.retain_response <= found.retain_bound * (1 + 1e-9)
    assert (found.origin is None) == (init == "zero")


def test_a_direction_that_is_the_mean_is_none_where_the_edit_is_orthogonal_to_it() -> None:
    model, recipe = networks.mlp((6, 4)), small("pca", mean="orthogonal", layers=["0"], retain_rank=1)
    noise = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise -= noise.mean(0)
    forget = noise * torch.tensor([3.0, 2, 0, 0, 0, 0])
    retain = noise * torch.tensor([0.0, 0, 0, 0, 1, 2]) + torch.tensor([5.0, 0, 0, 0, 0, 0])
    labels = torch.zeros(60, dtype=torch.int64)
    parts = [(forget, labels)], [(retain, labels + 1)]
    found = unmerge.diagnose(*parts, model, recipe=recipe).layers["0"]
    assert len(found.overlaps) == 1
    assert found.captured == pytest.approx((forget[:, 1].square().sum() / forget.square().sum()).item())
    with pytest.warns(UnmergeWarning, match="reduced: 0 to 1"):
        edit = unmerge.fit(model, *parts, init="zero", recipe=recipe)
    assert edit.layers["0"].rank == 1


@pytest.mark.parametrize("solver", ["exact", "budgeted", "soft-threshold"])
@pytest.mark.parametrize("basis", SOLVED)
def test_every_basis_and_solver_has_the_responses_of_its_edit(basis: str, solver: str) -> None:
    model = networks.mlp((9, 8, 5))
    forget, retain = request((9,), forgotten=(1, 3), kept=(0, 2, 4), each=9)
    recipe = small(basis, solver=solver, steps=12, lr=2e-3, delta=0.02)
    found = unmerge.diagnose([forget], [retain], model, recipe=recipe, alpha=0.7)
    for name, layer in found.layers.items():
        agrees(layer, direct(model, name, forget, retain, recipe, 0.7, None), 1e-5)


@pytest.mark.parametrize(("basis", "build"), [*((basis, "mlp") for basis in BASES), ("blend", "cnn")])
def test_the_responses_are_those_of_the_edit_that_fit_makes(basis: str, build: str) -> None:
    model, shape = (networks.mlp((9, 8, 5)), (9,)) if build == "mlp" else (networks.cnn(), (3, 6, 6))
    forget, retain = request(shape, forgotten=(1, 3), kept=(0, 2, 4), each=9)
    recipe = small(basis, alpha=1.7)
    found = unmerge.diagnose([forget], [retain], model, recipe=recipe)
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert found.alpha == 1.7, "the recipe's, where none is given"
    assert unmerge.diagnose([forget], [retain], model, recipe=small(basis)).alpha == 1
    assert found.basis == edit.recipe.basis
    for name, layer in edit.layers.items():
        (lost, kept) = (reference.layer_inputs(model, [name], *part)[name].groups[0] for part in (forget, retain))
        moved = 1.7 * layer.B @ layer.Q.T
        left = model.get_submodule(name).weight.detach().flatten(1) - moved
        assert found.layers[name].forget_response == pytest.approx((lost @ left.T).square().sum(1).mean().item())
        assert found.layers[name].retain_response == pytest.approx((kept @ moved.T).square().sum(1).mean().item())


def test_the_tail_energy_bounds_what_a_basis_of_that_rank_misses() -> None:
    """Lemma 1, with the rows as they are: ‖E‖² ≤ ‖C‖² N Σν beyond the rank, for τ = C X."""
    model = networks.mlp((24, 5))
    forget, retain = request((24,), each=15)
    layer = unmerge.diagnose([forget], [retain], model, recipe=small("pca")).layers["0"]
    rows = forget[0]
    mixing = torch.randn(5, len(rows), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors = torch.linalg.svd(rows, full_matrices=False)[2][:6].T  # a quarter of 24 features
    missed = mixing @ rows @ (torch.eye(24, dtype=torch.float64) - vectors @ vectors.T)
    total = rows.square().sum()  # N Σν
    assert 0 < layer.tail_energy < 1
    assert missed.square().sum() <= operator_norm(mixing) ** 2 * total * layer.tail_energy * (1 + 1e-9)


def test_the_share_of_the_task_vector_outside_the_inputs_is_that_of_all_rows() -> None:
    model = networks.mlp((20, 6))
    start = given_init(model)
    forget, retain = request((20,), each=3)  # nine rows: their span leaves out most of the input
    layer = unmerge.diagnose([forget], [retain], model, start, recipe=small()).layers["0"]
    rows = torch.cat([forget[0], retain[0]])
    span = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:8].T
    vector = model[0].weight.detach() - start["0.weight"]
    missed = vector - vector @ span @ span.T
    assert layer.origin is not None
    assert layer.origin.outside_span == pytest.approx((missed.norm() / vector.norm()).item() ** 2)
    assert layer.origin.outside_span > 0.1


def test_mean_and_spread_of_the_overlap_are_those_of_its_directions() -> None:
    model = networks.mlp((20, 6))
    forget, retain = request((20,), forgotten=(0, 1, 2), kept=(3, 4), each=9)
    layer = unmerge.diagnose([forget], [retain], model, recipe=small("pca", rank=5)).layers["0"]
    values = torch.tensor(layer.overlaps, dtype=torch.float64)
    assert len(values) == 5
    assert layer.overlap == pytest.approx(values.mean().item())
    assert layer.overlap_spread == pytest.approx(math.sqrt((values - values.mean()).square().mean()), rel=1e-5)


def test_without_retain_directions_nothing_overlaps() -> None:
    model = networks.mlp((9, 8, 5))
    forget, retain = request((9,), forgotten=(0, 1), kept=(2, 3))
    found = unmerge.diagnose([forget], [retain], model, recipe=small(retain_rank=0))
    for layer in found.layers.values():
        assert layer.overlaps == [0] * len(layer.overlaps)
        assert layer.cosines == layer.gains == []
    assert str(found)
    assert found._repr_html_()


def test_a_layer_without_a_direction_is_shown_as_such() -> None:
    """With fewer features than retained classes, private-mean finds nothing."""
    model = networks.mlp((2, 8, 5))
    forget, retain = request((2,), forgotten=(0,), kept=(1, 2, 3, 4))
    layer = unmerge.diagnose([forget], [retain], model, recipe=small("private-mean")).layers["0"]
    assert (layer.overlaps, layer.overlap, layer.overlap_spread, layer.captured) == ([], 0, 0, 0)
    assert layer.retain_response == 0


def test_real_digits_in_float32_agree_with_a_dense_float64_computation() -> None:
    split, _ = load_digits()
    model = train(split, epochs=2)
    pick = torch.arange(400)
    forgotten = split.labels[pick] == 3
    forget, retain = ((split.images[pick][part], split.labels[pick][part]) for part in (forgotten, ~forgotten))
    recipe = Recipe(basis="lda", layers=["3", "11"], head="edit")
    found = unmerge.diagnose(batched(forget, 32), batched(retain, 64), model, recipe=recipe, alpha=1.5)
    assert list(found.layers) == ["3", "11"]
    for name, layer in found.layers.items():
        agrees(layer, direct(model, name, forget, retain, recipe, 1.5, None), 2e-3)


# Which layers, and whose


def test_every_editable_layer_is_shown_and_those_that_are_edited_are_marked() -> None:
    model = networks.mlp((9, *(20,) * 9, 4))
    forget, retain = request((9,), forgotten=(0,), kept=(1, 2, 3), each=12)
    found = unmerge.diagnose([forget], [retain], model, recipe=Recipe(basis="lda"))
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=Recipe(basis="lda"))
    assert list(found.layers) == [str(place) for place in range(0, 20, 2)]
    assert 0 < len(edit.layers) < 5
    assert [name for name, layer in found.layers.items() if layer.edited] == list(edit.layers)
    scores = [layer.separability.score for layer in found.layers.values() if layer.edited]
    assert found.verdict.separability == pytest.approx(sum(scores) / len(scores)), "over the edited layers"
    shifts = [layer.mean_shift for layer in found.layers.values() if layer.edited]
    assert found.verdict.shift == pytest.approx(12 * max(shifts))


def test_the_classifier_is_not_edited_when_the_recipe_keeps_it() -> None:
    model = networks.mlp((9, 8, 5))
    forget, retain = request((9,))
    found = unmerge.diagnose([forget], [retain], model, recipe=small(head="keep"))
    assert {name: layer.edited for name, layer in found.layers.items()} == {"0": True, "2": False}


@pytest.mark.parametrize("shape", [None, (9, 7)], ids=["no classifier", "another number of classes"])
def test_what_init_lacks_is_left_out_where_it_is_not_edited_and_refused_where_it_is(
    shape: tuple[int, ...] | None,
) -> None:
    model = networks.mlp()
    forget, retain = ([part] for part in request((6,)))
    start = {name: value for name, value in given_init(model).items() if not name.startswith("4.")}
    if shape is not None:
        start["4.weight"] = torch.randn(shape, dtype=torch.float64)
    with pytest.warns(UnmergeWarning, match="init does not have 4: not edited, and left out of the diagnosis"):
        found = unmerge.diagnose(forget, retain, model, start, recipe=small(head="keep"))
    whole = unmerge.diagnose(forget, retain, model, given_init(model), recipe=small(head="keep"))
    assert found.layers == {name: whole.layers[name] for name in ("0", "2")}
    assert found.verdict == whole.verdict
    with pytest.raises(InitError, match=r'4\.weight.*\(the classifier with head="keep"\), or use init="zero"'):
        unmerge.diagnose(forget, retain, model, start, recipe=small())


def test_the_score_does_not_depend_on_the_recipe() -> None:
    model = networks.mlp((30, 8, 5))
    forget, retain = request((30,), forgotten=(0, 1), kept=(2, 3), each=20)
    recipes = small("lda"), small("pca", rank=5), small("contrastive", lam=50.0, retain_rank=1)
    found = [unmerge.diagnose([forget], [retain], model, recipe=recipe) for recipe in recipes]
    assert len({json.dumps(diagnosis.to_dict()["verdict"]) for diagnosis in found}) == 1
    assert len({diagnosis.layers["0"].separability for diagnosis in found}) == 1
    assert len({diagnosis.layers["0"].overlap for diagnosis in found}) == 3
    assert [diagnosis.basis for diagnosis in found] == ["lda", "pca", "contrastive"]


@pytest.mark.parametrize("build", ["linear", "convolution", "groups"])
def test_statistics_alone_give_what_the_data_gives(build: str, tmp_path: Path) -> None:
    make, shape, _ = KINDS[build]
    model = make()
    forget, retain = request(shape, forgotten=(0, 1), kept=(2, 3), each=6)
    from_data = unmerge.diagnose(batched(forget, 5), batched(retain, 4), model, recipe=small())
    lost = unmerge.collect(model, batched(forget, 5))
    kept = unmerge.collect(model, batched(retain, 4), lost)  # about the same pivots, as from data
    places = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:11].tolist()
    control = unmerge.collect(model, ChosenSamples(batched(retain, 4), places), kept)
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    from_statistics = unmerge.diagnose(lost, kept, model, recipe=small(), control=control)
    handle.remove()
    assert not calls, "no further pass"
    assert from_statistics.to_dict() == from_data.to_dict()
    mixed = unmerge.diagnose(lost, batched(retain, 4), model, recipe=small(), control=control)
    assert mixed.to_dict() == from_data.to_dict()
    mixed = unmerge.diagnose(batched(forget, 5), kept, model, recipe=small(), control=control)
    assert mixed.to_dict() == from_data.to_dict()

    everything = unmerge.collect(model, [forget, retain])
    everything.save(tmp_path / "all.safetensors")
    everything = unmerge.Statistics.load(tmp_path / "all.safetensors")
    for name, layer in unmerge.diagnose(lost, everything - lost, model, recipe=small()).layers.items():
        wanted = from_data.layers[name]
        for key in ("captured", "overlap", "forget_bound", "retain_response", "retain_bound", "mean_shift"):
            assert getattr(layer, key) == pytest.approx(getattr(wanted, key), rel=1e-5), (name, key)


def test_a_one_shot_iterator_is_enough_when_no_control_is_drawn() -> None:
    model = networks.mlp((9, 8, 5))
    forget, retain = request((9,), each=10)
    control = unmerge.collect(model, [retain[0][:10]])
    once = unmerge.diagnose(iter([forget]), iter([retain]), model, recipe=small(), control=control)
    assert once.to_dict() == unmerge.diagnose([forget], [retain], model, recipe=small(), control=control).to_dict()
    with pytest.raises(DataError, match=r"retain is a one-shot iterator .* random control"):
        unmerge.diagnose([forget], iter([retain]), model, recipe=small())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_bit_identical(fails: bool) -> None:
    model = networks.cnn().train()
    model.bn1.eval()
    forget, retain = request((3, 6, 6), forgotten=(0,), kept=(1, 2, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    random = torch.get_rng_state()

    class Broken:
        def __iter__(self) -> Any:
            yield retain
            raise KeyError("disk gone")

    if fails:
        with pytest.raises(KeyError, match="disk gone"):
            unmerge.diagnose([forget], Broken(), model, given_init(model), recipe=small())
    else:
        unmerge.diagnose([forget], [retain], model, given_init(model), recipe=small())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.get_rng_state().equal(random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_masks_and_forward_reach_every_pass() -> None:
    """Padding in a batch of sequences counts for nothing, in the control as well."""
    model = networks.mlp((9, 8, 5))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(30, 4, 9, generator=generator, dtype=torch.float64)
    kept = torch.ones(30, 4, dtype=torch.int64)
    kept[:, 3] = 0
    noisy = tokens.clone()
    noisy[:, 3] = 100
    found = []
    for inputs in (tokens, noisy):
        batches = [{"deep": inputs, "keep": kept}]
        first, rest = ([{key: value[part] for key, value in batches[0].items()}] for part in (range(10), range(10, 30)))
        found.append(
            unmerge.diagnose(
                first, rest, model, recipe=small(), mask="keep", forward=lambda model, batch: model(batch["deep"])
            )
        )
    assert found[0].to_dict() == found[1].to_dict()


# What it looks like


@pytest.fixture(scope="module")
def shown() -> Diagnosis:
    model = networks.cnn()
    forget, retain = request((3, 6, 6), forgotten=(0,), kept=(1, 2, 3))
    return unmerge.diagnose([forget], [retain], model, given_init(model), recipe=small("pca", layers=["conv2", "fc"]))


def test_it_prints_its_verdict_and_a_row_a_layer(shown: Diagnosis) -> None:
    verdict, table = str(shown).split("\n\n")
    assert verdict == str(shown.verdict)
    head, *lines = table.splitlines()
    assert head.startswith("layer")
    assert "pca: overlap" in head
    assert [line.split()[0] for line in lines] == ["conv2", "fc"]
    layer = shown.layers["fc"]
    assert f"{layer.separability.score:.3f}" in lines[1]
    assert f"{layer.overlap:.2f} ± {layer.overlap_spread:.2f}" in lines[1]
    assert f"{min(layer.gains):.2f}-{max(layer.gains):.2f}" in lines[1]


def test_it_is_a_table_in_a_notebook(shown: Diagnosis) -> None:
    found = shown._repr_html_()
    assert f"<b>{shown.verdict.kind}</b>" in found
    assert shown.verdict.sentence in found
    assert found.count("<tr>") == 1 + len(shown.layers)
    assert "<td>conv2</td>" in found


def test_a_model_that_is_one_layer_is_named() -> None:
    forget, retain = request((9,), each=10)
    found = unmerge.diagnose([forget], [retain], networks.ready(nn.Linear(9, 4)), recipe=small())
    assert "(model)" in str(found)


def test_it_is_plain_values_that_json_holds(shown: Diagnosis, tmp_path: Path) -> None:
    values = shown.to_dict()
    read = json.loads(shown.to_json(tmp_path / "diagnosis.json"))
    assert read == values
    assert json.loads((tmp_path / "diagnosis.json").read_text()) == values
    assert json.loads(shown.to_json()) == values
    assert values["samples"] == {"forget": 8, "retain": 24}
    assert values["verdict"]["kind"] == shown.verdict.kind
    fields = {name: getattr(shown.layers["fc"], name) for name in ("captured", "gains", "forget_bound", "features")}
    assert {name: values["layers"]["fc"][name] for name in fields} == fields
    assert values["layers"]["fc"]["origin"].keys() == {"cosine", "norm_ratio", "outside_span"}
    assert values["layers"]["fc"]["separability"].keys() == {"captured", "overlap"}


# Wrong input


def test_wrong_input_is_refused_by_name() -> None:
    model = networks.mlp((9, 8, 5))
    forget, retain = request((9,), each=10)
    lost, kept = unmerge.collect(model, [forget]), unmerge.collect(model, [retain])
    with pytest.raises(StatisticsError, match="different layers: 2 "):
        unmerge.diagnose(unmerge.collect(model, [forget], ["0"]), kept, model, recipe=small())
    with pytest.raises(StatisticsError, match="control has 7 samples; expected 10"):
        unmerge.diagnose(lost, kept, model, recipe=small(), control=unmerge.collect(model, [retain[0][:7]]))
    with pytest.raises(DataError, match="per_class='full'"):
        unmerge.diagnose(lost, kept, model, recipe=small("cav-class"))
    with pytest.raises(DataError, match="class label"):
        unmerge.diagnose([forget[0]], [retain], model, recipe=small("cav-class"))
    with pytest.raises(InitError, match="same weights as the model"):
        unmerge.diagnose(lost, kept, model, model, recipe=small())
    with pytest.raises(DataError, match="forget: the data gave no batch"):
        unmerge.diagnose([], [retain], model, recipe=small())
    with torch.no_grad():
        model[2].bias += 1
    with pytest.raises(StatisticsError, match=r"collected with other weights: '2\.bias' differs"):
        unmerge.diagnose(lost, kept, model, recipe=small())
