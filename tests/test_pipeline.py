"""fit(): the edit equals Algorithm 1 done literally, whatever way the data arrives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import reference
import unmerge
from networks import Batch, batched, request
from unmerge import Edit, Recipe
from unmerge.errors import DataError, EditError, LayerError, StatisticsError, UnmergeWarning
from unmerge.linalg.kmeans import kmeans
from unmerge.recipe import BASES as KNOWN

BASES = ("lda", "cav-class", "contrastive", "private-mean", "wiener", "pca", "deflated-pca")
SOLVERS = ("exact", "budgeted", "soft-threshold")
SOLVED = [(basis, solver) for basis in BASES for solver in SOLVERS if not KNOWN[basis].closed or solver == "exact"]


def small(basis: str = "lda", **knobs: Any) -> Recipe:
    """A recipe for tiny layers that edits all of them, and the classifier like the others."""
    defaults = {
        "rank": 3,
        "retain_rank": 2,
        "deflate": 2,
        "steps": 12,
        "delta": 0.02,
        "lr": 2e-3,
        "gamma": 0.3,
    }
    return Recipe(basis=basis, **(defaults | {"skip_layers": 0, "head": "edit"} | knobs))


def given_init(model: nn.Module) -> dict[str, Tensor]:
    """Other weights of the same shapes: the checkpoint that fine-tuning started from."""
    return networks.ready(copy.deepcopy(model), next(model.parameters()).dtype, seed=77).state_dict()


def groups_of(matrix: Tensor) -> list[Tensor]:
    """A stored matrix as one a group, in float64."""
    return list(matrix.double()) if matrix.dim() == 3 else [matrix.double()]


def orthonormality(basis: Tensor) -> float:
    """How far the columns are from orthonormal, over all groups."""
    identity = torch.eye(basis.shape[-1], dtype=torch.float64)
    return max((group.T @ group - identity).abs().max().item() for group in groups_of(basis))


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two matrices agree relative to the larger entries of the expected one."""
    return bool((found.double() - expected).abs().max() <= tolerance * max(1e-3, expected.abs().max().item()))


def agrees_with_reference(
    model: nn.Module,
    forget: Batch,
    retain: Batch,
    recipe: Recipe,
    init: Mapping[str, Tensor] | None = None,
    edit: Edit | None = None,
    norms: Mapping[str, str] | None = None,
    clusters: Mapping[str, list[Tensor]] | None = None,
    tolerance: float = 1e-6,
    alpha: float = 1.3,
) -> Edit:
    """Assert that bases, coefficients and edited weights are the reference's; returns the edit."""
    if edit is None:
        edit = unmerge.fit(
            model, batched(forget, 5), batched(retain, 7), init=init or "zero", recipe=recipe, check_init=False
        )
    expected = reference.unmerge(model, list(edit.layers), forget, retain, recipe, init, clusters, norms)
    for name, layer in edit.layers.items():
        assert orthonormality(layer.Q) < 1e-5, name
        bases, tasks = expected[name].forget_basis, expected[name].forget_task
        for B, Q, basis, task in zip(groups_of(layer.B), groups_of(layer.Q), bases, tasks, strict=True):
            if Q.shape[1] == basis.shape[1]:  # a group with fewer directions is filled up
                assert close(Q @ Q.T, basis @ basis.T, tolerance), f"projector of {name}"
            assert close(B @ Q.T, task, tolerance), f"coefficients of {name}"
        assert layer.rank == max(basis.shape[1] for basis in bases), name

    before = copy.deepcopy(model.state_dict())
    changed = reference.edited(model, expected, recipe, alpha, init, norms)
    with edit.applied(model, alpha):
        for name, tensor in model.state_dict().items():
            if name in changed:
                assert close(tensor, changed[name], tolerance), f"edited {name}"
            else:
                assert torch.equal(tensor, before[name]), f"untouched {name}"
    return edit


def same_edit(one: Edit, other: Edit, tolerance: float = 1e-8) -> None:
    """Assert that two edits change the same tensors by the same amounts."""
    assert list(one.layers) == list(other.layers)
    assert (one.head, one.removed, one.alpha) == (other.head, other.removed, other.alpha)
    for name, layer in one.layers.items():
        twin = other.layers[name]
        assert layer.shift_to == twin.shift_to, name
        assert close(layer.B @ layer.Q.mT, twin.B.double() @ twin.Q.double().mT, tolerance), name
        if layer.shift is not None:
            assert close(layer.shift, twin.shift.double(), tolerance), name


# Algorithm 1 against the reference


@pytest.mark.parametrize("init", ["zero", "given"])
@pytest.mark.parametrize(("basis", "solver"), SOLVED)
def test_every_basis_and_solver_gives_the_reference_edit(basis: str, solver: str, init: str) -> None:
    model = networks.mlp((7, 9, 8, 5))
    forget, retain = request((7,), forgotten=(1, 3), kept=(0, 2, 4), each=9)
    start = given_init(model) if init == "given" else None
    agrees_with_reference(model, forget, retain, small(basis, solver=solver), start)


@pytest.mark.parametrize("bias", ["keep", "shrink"])
@pytest.mark.parametrize("mean", ["free", "preserve", "orthogonal"])
@pytest.mark.parametrize("init", ["zero", "given"])
def test_the_bias_follows_the_paper_rule_and_the_mean(bias: str, mean: str, init: str) -> None:
    model = networks.mlp((6, 8, 4))
    forget, retain = request((6,), forgotten=(0, 1), kept=(2, 3))
    start = given_init(model) if init == "given" else None
    agrees_with_reference(model, forget, retain, small("cav-class", bias=bias, mean=mean, gamma=0.5), start)


@pytest.mark.parametrize("centering", ["separate", "retain"])
@pytest.mark.parametrize("ridge", [1e-4, 1e-1])
def test_both_centrings_of_the_probes_are_the_reference(centering: str, ridge: float) -> None:
    model = networks.mlp((6, 8, 5))
    forget, retain = request((6,), forgotten=(0, 1, 2), kept=(3, 4))
    agrees_with_reference(model, forget, retain, small("cav-class", centering=centering, ridge=ridge))


@pytest.mark.parametrize("kind", networks.CONVOLUTIONS)
@pytest.mark.parametrize("basis", ["lda", "pca", "cav-class", "private-mean", "wiener"])
def test_every_kind_of_convolution_gives_the_reference_edit(kind: str, basis: str) -> None:
    model = networks.convolution_net(kind)
    forget, retain = request((4, 6, 7), forgotten=(0, 1), kept=(2, 3), each=5)
    recipe = small(basis, layers=["conv"], retain_rank=3)
    edit = agrees_with_reference(model, forget, retain, recipe, given_init(model))
    assert list(edit.layers) == ["conv"]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("basis", ["contrastive", "deflated-pca", "pca"])
def test_groups_are_solved_each_for_itself(basis: str, solver: str) -> None:
    model = networks.convolution_net("groups")
    forget, retain = request((4, 6, 7), each=5)
    agrees_with_reference(model, forget, retain, small(basis, solver=solver, rank=2))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_same_padding_of_an_even_kernel_is_the_reference() -> None:
    model = networks.ready(networks.OneConvolution(nn.Conv2d(4, 6, (2, 4), padding="same", bias=False)))
    forget, retain = request((4, 6, 7), each=5)
    agrees_with_reference(model, forget, retain, small("pca", mean="free"))


@pytest.mark.parametrize("basis", BASES)
def test_batch_norms_take_the_constant_of_convolutions(basis: str) -> None:
    model = networks.cnn()
    forget, retain = request((3, 6, 6), forgotten=(0, 2), kept=(1, 3), each=6)
    agrees_with_reference(model, forget, retain, small(basis), norms={"conv1": "bn1", "conv2": "bn2"})


@pytest.mark.parametrize("init", ["zero", "given"])
@pytest.mark.parametrize("basis", BASES)
def test_conv1d_weights_are_edited_in_their_own_layout(basis: str, init: str) -> None:
    model = networks.conv1d_net(7, 6, 5)
    forget, retain = request((7,), forgotten=(0, 1), kept=(2, 3), each=8)
    start = given_init(model) if init == "given" else None
    edit = agrees_with_reference(model, forget, retain, small(basis), start)
    assert edit.layers["0"].transposed


@pytest.mark.parametrize("basis", ["lda", "pca", "cav-class", "private-mean"])
def test_a_vision_transformer_gets_the_reference_edit(basis: str) -> None:
    model = networks.hf_vit(classes=4)
    forget, retain = request((3, 8, 8), forgotten=(0, 1), kept=(2, 3), each=6)
    agrees_with_reference(model, forget, retain, small(basis), given_init(model))


@pytest.mark.parametrize("basis", ["lda", "contrastive", "cav-class"])
def test_a_transformers_resnet_gets_the_reference_edit(basis: str) -> None:
    model = networks.hf_resnet(classes=4)
    forget, retain = request((3, 32, 32), forgotten=(0, 1), kept=(2, 3), each=4)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    norms = {name: name.removesuffix("convolution") + "normalization" for name in convolutions}
    agrees_with_reference(model, forget, retain, small(basis), norms=norms)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("build", ["mlp", "cnn"])
def test_float32_models_agree_to_float32(build: str, basis: str) -> None:
    if build == "mlp":
        model, shape = networks.mlp((6, 8, 5), dtype=torch.float32), (6,)
        norms = {}
    else:
        model, shape = networks.cnn(dtype=torch.float32), (3, 6, 6)
        norms = {"conv1": "bn1", "conv2": "bn2"}
    forget, retain = request(shape, forgotten=(0, 1), kept=(2, 3), dtype=torch.float32)
    edit = agrees_with_reference(model, forget, retain, small(basis), norms=norms, tolerance=5e-4)
    assert all(layer.B.dtype == layer.Q.dtype == torch.float32 for layer in edit.layers.values())


@pytest.mark.parametrize("basis", ["lda", "pca", "cav-class", "private-mean"])
def test_bfloat16_models_get_float32_edits_near_the_reference(basis: str) -> None:
    model = networks.mlp((6, 8, 5), dtype=torch.bfloat16)
    forget, retain = request((6,), forgotten=(0, 1), kept=(2, 3), each=40, dtype=torch.bfloat16)
    edit = agrees_with_reference(model, forget, retain, small(basis, layers=["0"]), tolerance=1e-2)
    assert edit.layers["0"].B.dtype == edit.layers["0"].Q.dtype == torch.float32


@pytest.mark.parametrize("basis", ["pca", "contrastive"])
def test_wide_layers_hold_the_energy_of_the_reference(basis: str) -> None:
    features = 1100
    model = networks.mlp((features, 3), dtype=torch.float32)
    decay = (1 + torch.arange(features)) ** -0.4
    forget, retain = request((features,), forgotten=(0, 1), kept=(2, 3), each=100, dtype=torch.float32)
    forget, retain = ((inputs * decay, labels) for inputs, labels in (forget, retain))
    recipe = small(basis, rank=12)
    edit = unmerge.fit(model, batched(forget, 64), batched(retain, 64), init="zero", recipe=recipe)
    found, expected = (
        edit.layers["0"].Q.double(),
        reference.unmerge(model, ["0"], forget, retain, recipe)["0"],
    )
    assert orthonormality(found) < 1e-5
    rows = forget[0].double() - (forget if basis == "pca" else retain)[0].double().mean(0)
    held = [(rows @ basis).square().sum() for basis in (found, expected.forget_basis[0])]
    assert abs(held[0] / held[1] - 1) < 1e-3
    if basis == "pca":
        assert held[0] > 0.9999 * held[1]


# Any split, any order, any shape


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Sizes of the first batches; the rest follows in one."""
    return draw(st.lists(st.integers(1, 9), max_size=5))


def shuffled(data: Batch, seed: int) -> Batch:
    """The same samples in another order."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    return data[0][order], data[1][order]


@pytest.mark.filterwarnings("ignore:rank=:unmerge.errors.UnmergeWarning")
@settings(max_examples=25, deadline=None)
@given(
    solved=st.sampled_from(SOLVED),
    sizes=st.tuples(st.integers(5, 9), st.integers(4, 9), st.integers(5, 6)),
    forgotten=st.sampled_from([(0, 1), (4, 2, 1)]),
    splits=st.tuples(cuts(), cuts()),
    seed=st.integers(0, 1000),
    labelled_order=st.booleans(),
)
def test_linear_networks_of_any_shape_split_and_order(
    solved: tuple[str, str],
    sizes: tuple[int, int, int],
    forgotten: tuple[int, ...],
    splits: tuple[list[int], list[int]],
    seed: int,
    labelled_order: bool,
) -> None:
    model = networks.mlp(sizes, seed=seed)
    kept = tuple(label for label in range(5) if label not in forgotten)
    forget, retain = request((sizes[0],), forgotten, kept, each=7, seed=seed)
    basis, solver = solved
    recipe = small(basis, solver=solver, layers=["0"] if basis == "private-mean" else None)
    if labelled_order:
        first, second = (part[1].argsort() for part in (forget, retain))
        fed = (forget[0][first], forget[1][first]), (retain[0][second], retain[1][second])
    else:
        fed = shuffled(forget, seed), shuffled(retain, seed + 1)
    edit = unmerge.fit(model, batched(fed[0], splits[0]), batched(fed[1], splits[1]), init="zero", recipe=recipe)
    agrees_with_reference(model, forget, retain, recipe, edit=edit)


@pytest.mark.filterwarnings("ignore:rank=:unmerge.errors.UnmergeWarning")
@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(sorted(networks.CONVOLUTIONS)),
    solved=st.sampled_from(SOLVED),
    size=st.tuples(st.integers(5, 8), st.integers(5, 8)),
    splits=st.tuples(cuts(), cuts()),
    seed=st.integers(0, 1000),
)
def test_convolutions_of_any_kind_size_split_and_order(
    kind: str,
    solved: tuple[str, str],
    size: tuple[int, int],
    splits: tuple[list[int], list[int]],
    seed: int,
) -> None:
    model = networks.convolution_net(kind, seed=seed)
    forget, retain = request((4, *size), forgotten=(0, 1), kept=(2, 3), each=4, seed=seed)
    basis, solver = solved
    recipe = small(basis, solver=solver, layers=["conv"])
    edit = unmerge.fit(
        model,
        batched(shuffled(forget, seed), splits[0]),
        batched(shuffled(retain, seed), splits[1]),
        init="zero",
        recipe=recipe,
    )
    agrees_with_reference(model, forget, retain, recipe, edit=edit)


def test_without_labels_the_forget_set_is_one_class_for_lda() -> None:
    model = networks.mlp()
    forget, retain = request((6,), forgotten=(0, 1), kept=(2, 3))
    edit = unmerge.fit(model, [forget[0]], [retain[0]], init="zero", recipe=small("lda"))
    agrees_with_reference(model, (forget[0], None), (retain[0], None), small("lda"), edit=edit)


# Data, statistics, differences of statistics


def collected(model: nn.Module, data: Batch, basis: str, **options: Any) -> unmerge.Statistics:
    """Statistics with what the basis needs."""
    needs = {"cav-class": {"per_class": "full"}, "cav-kmeans": {"sample": 10_000}}.get(basis, {})
    return unmerge.collect(model, batched(data, 6), **needs, **options)


def together(forget: Batch, retain: Batch) -> Batch:
    """Forget and retain samples in one set."""
    return torch.cat([forget[0], retain[0]]), torch.cat([forget[1], retain[1]])


@pytest.mark.parametrize("build", ["mlp", "cnn", "groups"])
@pytest.mark.parametrize("basis", [*BASES, "cav-kmeans"])
def test_data_statistics_and_differences_give_one_edit(build: str, basis: str, tmp_path: Path) -> None:
    models = {"mlp": networks.mlp, "cnn": networks.cnn, "groups": lambda: networks.convolution_net("groups")}
    shapes = {"mlp": (6,), "cnn": (3, 6, 6), "groups": (4, 6, 7)}
    model = models[build]()
    forget, retain = request(shapes[build], forgotten=(0, 1), kept=(2, 3), each=6)
    recipe = small(basis, rank=2)
    from_data = unmerge.fit(model, batched(forget, 6), batched(retain, 4), init="zero", recipe=recipe)

    lost, kept = collected(model, forget, basis), unmerge.collect(model, batched(retain, 5))
    same_edit(unmerge.fit(model, lost, kept, init="zero", recipe=recipe), from_data)
    same_edit(unmerge.fit(model, batched(forget, 6), kept, init="zero", recipe=recipe), from_data)
    same_edit(unmerge.fit(model, lost, batched(retain, 5), init="zero", recipe=recipe), from_data)

    whole = unmerge.collect(model, batched(together(forget, retain), 7))
    same_edit(unmerge.fit(model, lost, whole - lost, init="zero", recipe=recipe), from_data, 1e-6)

    lost.save(tmp_path / "lost.safetensors")
    whole.save(tmp_path / "whole.safetensors")
    read = [unmerge.Statistics.load(tmp_path / f"{name}.safetensors") for name in ("lost", "whole")]
    same_edit(unmerge.fit(model, read[0], read[1] - read[0], init="zero", recipe=recipe), from_data, 1e-6)


@pytest.mark.parametrize("basis", BASES)
def test_float32_differences_of_statistics_agree_to_float32(basis: str) -> None:
    model = networks.mlp((9, 8, 6), dtype=torch.float32)
    forget, retain = request((9,), forgotten=(0, 1), kept=(2, 3, 4), each=20, dtype=torch.float32)
    recipe = small(basis)
    lost, whole = (
        collected(model, forget, basis),
        unmerge.collect(model, batched(together(forget, retain), 7)),
    )
    from_data = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    same_edit(unmerge.fit(model, lost, whole - lost, init="zero", recipe=recipe), from_data, 1e-3)


@pytest.mark.parametrize("build", ["mlp", "cnn", "depthwise"])
def test_classes_alone_give_private_mean_exactly(build: str) -> None:
    models = {
        "mlp": networks.mlp,
        "cnn": networks.cnn,
        "depthwise": lambda: networks.convolution_net("depthwise"),
    }
    shapes = {"mlp": (6,), "cnn": (3, 6, 6), "depthwise": (4, 6, 7)}
    model = models[build]()
    forget, retain = request(shapes[build], forgotten=(0, 2), kept=(1, 3), each=6)
    recipe = small("private-mean", head="auto")
    whole = unmerge.collect(model, batched(together(forget, retain), 7))
    from_data = unmerge.fit(model, batched(forget, 6), batched(retain, 4), init="zero", recipe=recipe)
    for _ in range(2):  # the second time from the factors kept with the statistics
        from_classes = unmerge.fit(model, classes=[2, 0], statistics=whole, init="zero", recipe=recipe)
        same_edit(from_classes, from_data)
        assert from_classes.provenance["notes"]["approximations"] == []
        assert all(layer.Q.is_contiguous() for layer in from_classes.layers.values()), "not a view of something larger"


def test_classes_alone_approximate_lda_and_say_so() -> None:
    model = networks.mlp((8, 10, 9, 10))
    forget, retain = request((8,), forgotten=(0,), kept=range(1, 10), each=30)
    recipe = small("lda", retain_rank=4, gamma=0.0)
    whole = unmerge.collect(model, batched(together(forget, retain), 50))
    exact = unmerge.fit(model, batched(forget, 50), batched(retain, 50), init="zero", recipe=recipe)
    close_to = unmerge.fit(model, classes=[0], statistics=whole, init="zero", recipe=recipe)
    notes = close_to.provenance["notes"]["approximations"]
    assert len(notes) == 1
    assert "retain eigenvectors" in notes[0]
    assert exact.provenance["notes"]["approximations"] == []
    for name, layer in close_to.layers.items():
        twin = exact.layers[name]
        assert close(layer.Q @ layer.Q.T, twin.Q @ twin.Q.T, 1e-8), "the forget directions are exact"
        task, wanted = layer.B @ layer.Q.T, twin.B @ twin.Q.T
        assert (task - wanted).norm() < 0.2 * wanted.norm(), name
        assert close(task @ layer.Q, layer.B, 1e-8)


def test_classes_alone_give_lda_exactly_without_a_retain_span() -> None:
    model = networks.mlp()
    forget, retain = request((6,), forgotten=(0, 3), kept=(1, 2))
    recipe = small("lda", retain_rank=0)
    whole = unmerge.collect(model, batched(together(forget, retain), 7))
    from_data = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    same_edit(unmerge.fit(model, classes=[0, 3], statistics=whole, init="zero", recipe=recipe), from_data)


@pytest.mark.parametrize("basis", ["pca", "deflated-pca", "contrastive", "cav-class", "cav-kmeans"])
def test_classes_alone_are_refused_by_bases_that_need_more_than_means(basis: str) -> None:
    model = networks.mlp()
    forget, retain = request((6,), forgotten=(0, 3), kept=(1, 2))
    whole = unmerge.collect(model, batched(together(forget, retain), 7))
    with pytest.raises(DataError, match="lda"):
        unmerge.fit(model, classes=[0, 3], statistics=whole, init="zero", recipe=small(basis))


@pytest.mark.parametrize("basis", ["cav-class", "cav-kmeans"])
def test_probes_from_classes_alone_never_mix_in_retained_classes(basis: str) -> None:
    """Statistics of everything that hold enough for CAV: the edit is that from data, or an error."""
    model = networks.mlp()
    forget, retain = request((6,), forgotten=(0, 3), kept=(1, 2))
    whole = collected(model, together(forget, retain), basis)
    recipe = small(basis)
    expected = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    try:
        found = unmerge.fit(model, classes=[0, 3], statistics=whole, init="zero", recipe=recipe)
    except DataError:
        return
    same_edit(found, expected)


def test_what_is_forgotten_is_given_in_exactly_one_way() -> None:
    model = networks.mlp()
    forget, retain = request((6,))
    whole = unmerge.collect(model, [together(forget, retain)])
    arguments: list[dict[str, Any]] = [
        {},
        {"forget": [forget]},
        {"classes": [0]},
        {"statistics": whole},
        {"classes": [0], "statistics": whole, "retain": [retain]},
    ]
    for chosen in arguments:
        with pytest.raises(DataError, match="classes="):
            unmerge.fit(model, init="zero", recipe=small(), **chosen)


@pytest.mark.parametrize("classes", [[9], [0, 1, 2]])
def test_classes_must_be_some_of_those_collected(classes: list[int]) -> None:
    model = networks.mlp()
    whole = unmerge.collect(model, [together(*request((6,)))])
    with pytest.raises(StatisticsError, match="classes="):
        unmerge.fit(model, classes=classes, statistics=whole, init="zero", recipe=small())


def test_statistics_of_other_weights_are_refused() -> None:
    model = networks.mlp()
    forget, retain = request((6,))
    lost, kept = (unmerge.collect(model, [data]) for data in (forget, retain))
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    with pytest.raises(StatisticsError, match=r"0\.weight"):
        unmerge.fit(model, lost, kept, init="zero", recipe=small())
    with pytest.raises(StatisticsError, match=r"0\.weight"):
        unmerge.fit(model, [forget], kept, init="zero", recipe=small())


# Limited rows and clusters


@pytest.mark.parametrize("build", ["mlp", "plain", "depthwise"])
@pytest.mark.parametrize("points", [11, 17])
def test_max_points_fits_probes_on_the_first_rows(build: str, points: int) -> None:
    if build == "mlp":
        model, shape, layer = networks.mlp(), (6,), ["0"]
    else:
        model, shape, layer = networks.convolution_net(build), (4, 6, 7), ["conv"]
        points *= 10
    forget, retain = request(shape, forgotten=(0, 1), kept=(2, 3), each=9)
    recipe = small("cav-class", max_points=points, layers=layer)
    limited = agrees_with_reference(model, forget, retain, recipe)
    everything = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe.but(max_points=None))
    difference = limited.layers[layer[0]].Q - everything.layers[layer[0]].Q
    assert difference.abs().max() > 1e-3, "the limit must have had an effect"


def test_max_points_above_all_rows_changes_nothing() -> None:
    model = networks.mlp()
    forget, retain = request((6,), forgotten=(0, 1), kept=(2, 3))
    recipe = small("cav-class")
    everything = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    limited = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe.but(max_points=10_000))
    same_edit(limited, everything)


def test_max_points_needs_the_data_and_more_than_one_reading() -> None:
    model = networks.mlp()
    forget, retain = request((6,), forgotten=(0, 1), kept=(2, 3))
    recipe = small("cav-class", max_points=10)
    with pytest.raises(DataError, match="max_points"):
        unmerge.fit(model, collected(model, forget, "cav-class"), [retain], init="zero", recipe=recipe)
    with pytest.raises(DataError, match="second time"):
        unmerge.fit(model, [forget], iter([retain]), init="zero", recipe=recipe)


def cluster_of(model: nn.Module, names: list[str], forget: Batch, recipe: Recipe) -> dict[str, list[Tensor]]:
    """The clusters that k-means finds among the rows of each layer."""
    seen = reference.layer_inputs(model, names, *forget)
    limit = recipe.max_points
    return {
        name: [kmeans(group, recipe.rank, recipe.seed) for group in seen[name].first(limit).groups] for name in names
    }


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("build", ["mlp", "plain", "groups", "hf_vit"])
@pytest.mark.parametrize("centering", ["separate", "retain"])
def test_kmeans_probes_are_the_reference_for_the_same_clusters(build: str, centering: str, solver: str) -> None:
    if build == "mlp":
        model, shape, layers = networks.mlp(), (6,), ["0", "2"]
    elif build == "hf_vit":
        model, shape = networks.hf_vit(), (3, 8, 8)
        layers = ["vit.layers.1.mlp.fc1", "vit.layers.1.attention.k_proj"]
    else:
        model, shape, layers = networks.convolution_net(build), (4, 6, 7), ["conv"]
    forget, retain = request(shape, each=12 if build == "mlp" else 4)
    recipe = small("cav-kmeans", rank=4, solver=solver, centering=centering, layers=layers)
    clusters = cluster_of(model, layers, forget, recipe)
    start = given_init(model)
    edit = unmerge.fit(model, batched(forget, 3), batched(retain, 5), init=start, recipe=recipe, check_init=False)
    agrees_with_reference(model, forget, retain, recipe, start, edit=edit, clusters=clusters)


def test_kmeans_with_limited_rows_is_the_reference_on_the_first_rows() -> None:
    model = networks.convolution_net("plain")
    forget, retain = request((4, 6, 7), each=6)
    recipe = small("cav-kmeans", rank=4, max_points=150, layers=["conv"])
    agrees_with_reference(model, forget, retain, recipe, clusters=cluster_of(model, ["conv"], forget, recipe))


def test_kmeans_on_a_part_of_the_rows_finds_nearly_the_same_span() -> None:
    model = networks.mlp((6, 5))
    forget, retain = request((6,), forgotten=(0, 1, 2), kept=(3, 4), each=400)
    recipe = small("cav-kmeans", rank=3, layers=["0"], gamma=0.0)
    kept = unmerge.collect(model, [retain])
    every, some = (unmerge.collect(model, [forget], sample=size) for size in (1200, 600))
    one, other = (unmerge.fit(model, lost, kept, init="zero", recipe=recipe) for lost in (every, some))
    overlap = one.layers["0"].Q.T @ other.layers["0"].Q
    assert torch.linalg.svdvals(overlap).min() > 0.9


# Ranks


def test_a_rank_beyond_the_data_is_reduced_with_a_warning_that_says_to_what() -> None:
    model = networks.mlp((6, 8, 4))
    forget, retain = request((6,), each=4)
    with pytest.warns(UnmergeWarning, match=r"rank=5 .*\b0 to 3"):
        edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small("pca", rank=5))
    assert edit.layers["0"].rank == 3
    assert edit.provenance["notes"]["rank_reduced"]["0"] == 3
    agrees_with_reference(model, forget, retain, small("pca", rank=5), edit=edit)


@pytest.mark.parametrize("basis", ["pca", "contrastive", "lda", "cav-class"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_rows_than_features_give_finite_edits(basis: str, dtype: torch.dtype) -> None:
    model = networks.mlp((40, 6), dtype=dtype)
    forget, retain = request((40,), forgotten=(0, 1), kept=(2, 3), each=4, dtype=dtype)
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(basis, retain_rank=3))
    layer = edit.layers["0"]
    assert layer.B.isfinite().all()
    assert orthonormality(layer.Q) < 1e-5
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    agrees_with_reference(model, forget, retain, small(basis, retain_rank=3), edit=edit, tolerance=tolerance)


@pytest.mark.parametrize("basis", ["pca", "contrastive"])
def test_a_rank_beyond_few_float32_rows_finds_no_directions_in_rounding(basis: str) -> None:
    model = networks.mlp((60, 3), dtype=torch.float32)
    forget, retain = request((60,), each=10, dtype=torch.float32)
    with pytest.warns(UnmergeWarning, match="reduced"):
        edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(basis, rank=32))
    assert edit.layers["0"].rank == (9 if basis == "pca" else 10)  # about m_R the mean counts too


def test_one_class_with_separate_centring_is_an_error_that_says_what_to_type() -> None:
    model = networks.mlp()
    forget, retain = request((6,))
    with pytest.raises(LayerError, match=r"layer '0'.*centering='retain'.*lda"):
        unmerge.fit(model, [forget], [retain], init="zero", recipe=small("cav-class", centering="separate"))
    for recipe in (small("cav-class", centering="retain"), small("lda")):
        assert unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe).layers["0"].rank == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("basis", ["lda", "cav-class"])
def test_a_forget_set_with_the_retain_mean_has_no_direction(basis: str, dtype: torch.dtype) -> None:
    model = networks.mlp((6, 4), dtype=dtype)
    inputs = networks.samples((6,), [0] * 30, dtype, apart=3.0)[0]
    forget, retain = (
        (inputs, torch.zeros(30, dtype=torch.long)),
        (inputs.flip(0), torch.ones(30, dtype=torch.long)),
    )
    with pytest.raises(LayerError, match="no forget direction"):
        unmerge.fit(model, batched(forget, 7), batched(retain, 4), init="zero", recipe=small(basis))


def test_deflating_leaves_room_for_the_directions_that_are_asked_for() -> None:
    forget, retain = request((6,))
    recipe = unmerge.Recipe(basis="deflated-pca", rank=1, skip_layers=0)
    edit = unmerge.fit(networks.mlp(), [forget], [retain], init="zero", recipe=recipe)
    assert all(layer.rank == 1 for layer in edit.layers.values())


def test_statistics_of_a_model_with_a_tied_head_edit_the_same_layers_as_data() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = torch.nn.Linear(6, 6), networks.mlp((6, 8, 8, 8, 8, 6))
            self.head = torch.nn.Linear(6, 6)
            self.head.weight = self.embed.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(inputs)))

    model = Tied().double().eval()
    forget, retain = request((6,))
    with pytest.warns(UnmergeWarning, match="shares its weight"):
        forgotten = unmerge.collect(model, [forget])
    kept = unmerge.collect(model, [retain], forgotten)
    with pytest.warns(UnmergeWarning, match="shares its weight"):
        from_data = unmerge.fit(model, [forget], [retain], init="zero")
    from_statistics = unmerge.fit(model, forgotten, kept, init="zero")
    assert list(from_data.layers) == list(from_statistics.layers)
    assert len(from_data.layers) < len(kept.layers)


def test_a_request_does_not_depend_on_those_made_before_from_the_same_statistics() -> None:
    model = networks.mlp()
    images, labels = networks.samples((6,), [0, 0, 1, 1, 2, 2, 3, 3] * 4)
    recipe = unmerge.Recipe(basis="private-mean", skip_layers=0, head="edit")

    def edit_of(label: int, everything: unmerge.Statistics) -> unmerge.Edit:
        half = (labels == label).nonzero()[:4, 0]
        forget = unmerge.collect(model, [(images[half], labels[half])], everything)
        return unmerge.fit(model, forget, everything - forget, init="zero", recipe=recipe, on_verdict="ignore")

    everything = unmerge.collect(model, [(images, labels)])
    edit_of(3, everything)
    after, fresh = edit_of(1, everything), edit_of(1, unmerge.collect(model, [(images, labels)]))
    for name, layer in after.layers.items():
        assert torch.allclose(layer.B @ layer.Q.mT, fresh.layers[name].B @ fresh.layers[name].Q.mT)


def test_few_rows_of_an_unshuffled_request_are_refused_with_the_classes_they_miss() -> None:
    forget, retain = request((6,), forgotten=(0, 1), kept=(2, 3))
    order = forget[1].argsort()
    recipe = small("cav-class").but(max_points=2)
    with pytest.raises(DataError, match="Shuffle the forget batches"):
        unmerge.fit(networks.mlp(), [(forget[0][order], forget[1][order])], [retain], init="zero", recipe=recipe)


def test_a_small_task_vector_of_a_bfloat16_model_is_not_rounded() -> None:
    model = networks.mlp(dtype=torch.bfloat16)
    noise = torch.Generator().manual_seed(1)
    start = {
        name: value.float() - 1e-3 * torch.randn(value.shape, generator=noise)
        for name, value in model.state_dict().items()
    }
    wide = copy.deepcopy(model).double()
    forget, retain = request((6,), dtype=torch.bfloat16)
    recipe = unmerge.Recipe(basis="pca", rank=2, skip_layers=0, mean="free", head="edit")
    found = unmerge.fit(model, [forget], [retain], init=start, recipe=recipe, check_init=False)
    for name, layer in found.layers.items():
        vector = wide.state_dict()[f"{name}.weight"] - start[f"{name}.weight"].double()
        along = (vector @ layer.Q.double()).norm()
        assert layer.B.double().norm() <= 1.001 * along
    shares = found.survived(model, alpha=1.0)
    assert any(share < 0.999 for share in shares.values())
    assert all(share == pytest.approx(1) for share in found.survived(wide, alpha=1.0).values())


def test_private_mean_skips_and_names_a_layer_spanned_by_the_retain_means() -> None:
    model = networks.mlp((6, 3, 5))
    forget, retain = request((6,), forgotten=(0,), kept=(1, 2, 3, 4))
    recipe = small("private-mean")
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert list(edit.layers) == ["0"]
    assert edit.provenance["notes"]["spanned_by_retain"] == ["2"]
    with pytest.raises(LayerError, match="lda"):
        unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe.but(layers=["2"]))


@pytest.mark.parametrize(
    ("head", "knobs"),
    [("auto", {}), ("remove", {}), ("auto", {"mean": "orthogonal"}), ("remove", {"bias": "shrink", "gamma": 0.5})],
)
def test_rows_of_a_classifier_that_the_retain_means_span_go_all_the_same(
    head: str, knobs: dict[str, Any], tmp_path: Path
) -> None:
    model = networks.mlp((6, 3, 5))
    forget, retain = request((6,), forgotten=(0,), kept=(1, 2, 3, 4))
    before = copy.deepcopy(model.state_dict())
    recipe = unmerge.Recipe(basis="private-mean", skip_layers=0, head=head, **knobs)
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert (edit.alpha, edit.head, edit.removed) == (1.0, "2", (0,))
    assert {name: layer.rank > 0 for name, layer in edit.layers.items()} == {"0": True, "2": False}
    assert edit.provenance["notes"]["spanned_by_retain"] == ["2"]
    edit.save(tmp_path)
    for each in (edit, unmerge.Edit.load(tmp_path), unmerge.compose([edit])):
        each.apply(model)
        assert (model(forget[0])[:, 0] == -1e4).all()
        torch.testing.assert_close(model[2].weight[1:], before["2.weight"][1:], rtol=0, atol=0)
        torch.testing.assert_close(model[2].bias[1:], before["2.bias"][1:], rtol=0, atol=0)
        assert each.survived(model)["2"] == 1
        each.revert(model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(LayerError, match="lda"):
        unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe.but(layers=["2"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_private_mean_with_one_retain_class_gives_up_no_direction(dtype: torch.dtype) -> None:
    """Its mean is the retain mean, so there is no retain span; rounding must not make one."""
    model = networks.mlp((6, 8, 2), dtype=dtype)
    forget, retain = request((6,), forgotten=(0,), kept=(1,), each=20, dtype=dtype)
    edit = unmerge.fit(model, batched(forget, 6), batched(retain, 9), init="zero", recipe=small("private-mean"))
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    agrees_with_reference(model, forget, retain, small("private-mean"), edit=edit, tolerance=tolerance)


def test_private_mean_without_retain_labels_asks_for_them() -> None:
    model = networks.mlp()
    forget, retain = request((6,))
    with pytest.raises(DataError, match="label"):
        unmerge.fit(model, [forget], [retain[0]], init="zero", recipe=small("private-mean"))


def test_private_mean_takes_an_unlabelled_forget_set_as_one_class() -> None:
    model = networks.mlp()
    forget, retain = request((6,))
    recipe = small("private-mean")
    labelled = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    same_edit(unmerge.fit(model, [forget[0]], [retain], init="zero", recipe=recipe), labelled)


# The mean response


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("build", ["mlp", "groups"])
def test_orthogonal_directions_keep_the_mean_retain_response_without_a_constant(basis: str, build: str) -> None:
    model, shape, layers = networks.mlp((7, 9, 8, 5)), (7,), ["0"]
    if build == "groups":
        model, shape, layers = networks.convolution_net("groups"), (4, 6, 7), ["conv"]
    forget, retain = request(shape, forgotten=(1, 3), kept=(0, 2), each=9)
    recipe = small(basis, mean="orthogonal", layers=layers)
    edit = agrees_with_reference(model, forget, retain, recipe)
    (layer,) = edit.layers.values()
    assert layer.shift is None
    assert edit.provenance["notes"]["mean_left_free"] == []
    mean = unmerge.collect(model, [retain], layers)[layers[0]].moments.mean.unsqueeze(-1)
    assert (layer.B.double() @ layer.Q.double().mT @ mean).abs().max() < 1e-6 * layer.B.abs().max()


@pytest.mark.parametrize("basis", BASES)
def test_the_mean_retain_response_of_a_linear_is_preserved(basis: str) -> None:
    model = networks.mlp((7, 9, 5))
    forget, retain = request((7,), forgotten=(0, 1), kept=(2, 3, 4))
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(basis, mean="preserve", layers=["0"]))
    before = model[0](retain[0])
    with edit.applied(model, 1.5):
        after = model[0](retain[0])
    assert torch.allclose(after.mean(0), before.mean(0), atol=1e-10)
    assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("layer", ["conv1", "conv2"])
def test_the_mean_retain_response_behind_a_batch_norm_is_preserved(basis: str, layer: str) -> None:
    model = networks.cnn()
    forget, retain = request((3, 6, 6), forgotten=(0, 1), kept=(2, 3))
    recipe = small(basis, mean="preserve", layers=[layer])
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert edit.layers[layer].shift_to == f"bn{layer[-1]}.running_mean"
    before = normalised(model, f"bn{layer[-1]}", retain)
    with edit.applied(model, 1.5):
        after = normalised(model, f"bn{layer[-1]}", retain)
    assert torch.allclose(after.mean((0, 2, 3)), before.mean((0, 2, 3)), atol=1e-10)
    assert not torch.allclose(after, before, atol=1e-3)


def normalised(model: nn.Module, norm: str, data: Batch) -> Tensor:
    """What a BatchNorm returns for some samples."""
    seen: list[Tensor] = []
    with (
        model.get_submodule(norm).register_forward_hook(lambda _, __, output: seen.append(output)),
        torch.no_grad(),
    ):
        model(data[0])
    return seen[0]


def test_a_layer_with_nowhere_to_put_the_constant_is_named() -> None:
    model = networks.ready(nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)))
    forget, retain = request((6,))
    with pytest.raises(LayerError, match=r"'0'.*mean='orthogonal' or 'auto'"):
        unmerge.fit(model, [forget], [retain], init="zero", recipe=small(mean="preserve"))
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(mean="auto"))
    assert edit.layers["0"].shift is None
    assert edit.provenance["notes"]["mean_left_free"] == ["0"]


@pytest.mark.parametrize("build", ["mlp", "depthwise"])
def test_private_mean_keeps_the_response_to_every_retain_class_mean(build: str) -> None:
    if build == "mlp":
        model, shape, layer = networks.mlp((9, 7, 6)), (9,), "0"
    else:
        model, shape, layer = networks.convolution_net("depthwise"), (4, 6, 7), "conv"
    forget, retain = request(shape, forgotten=(0, 1), kept=(2, 3, 4), each=6)
    recipe = small("private-mean", mean="preserve", layers=[layer])
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    module = model.get_submodule(layer)
    seen = {}
    with module.register_forward_hook(lambda _, args, __: seen.update(inputs=args[0])), torch.no_grad():
        model(retain[0])
    before = module(seen["inputs"])
    with edit.applied(model, 1.0), torch.no_grad():
        after = module(seen["inputs"])
    dims = (0,) if before.dim() == 2 else (0, 2, 3)
    for label in (2, 3, 4):
        chosen = retain[1] == label
        assert torch.allclose(after[chosen].mean(dims), before[chosen].mean(dims), atol=1e-10), label
    assert not torch.allclose(after, before, atol=1e-3)


# Groups


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("dead", [0.0, 0.7], ids=["zero", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_depthwise_channel_leaves_bases_orthonormal_and_is_not_edited(
    basis: str, dead: float, dtype: torch.dtype
) -> None:
    model = networks.ready(networks.OneConvolution(nn.Conv2d(4, 8, 3, groups=4)), dtype)
    with torch.no_grad():
        model.stem.weight[1] = 0
        model.stem.bias.copy_(torch.tensor([0.1, dead, 0.3, 0.2]))
    forget, retain = request((4, 6, 7), forgotten=(0, 1), kept=(2, 3), each=6, dtype=dtype)
    recipe = small(basis, layers=["conv"], mean="free", deflate=1)
    edit = unmerge.fit(model, batched(forget, 5), batched(retain, 5), init="zero", recipe=recipe)
    layer = edit.layers["conv"]
    assert layer.Q.shape[0] == 4
    assert orthonormality(layer.Q) < 1e-5
    assert layer.B.isfinite().all()
    assert layer.B[1].abs().max() < 1e-9, "no sample tells anything about this channel"
    assert layer.B[0].abs().max() > 1e-3


# Numbers far from zero


@pytest.mark.parametrize("ratio", [300.0, 1000.0])
@pytest.mark.parametrize("basis", ["lda", "pca", "cav-class", "contrastive"])
def test_inputs_with_a_mean_far_above_their_deviation_keep_their_directions(basis: str, ratio: float) -> None:
    model = networks.mlp((12, 6), dtype=torch.float32)
    forget, retain = request((12,), forgotten=(0, 1), kept=(2, 3), each=60, dtype=torch.float32)
    forget, retain = ((inputs + ratio, labels) for inputs, labels in (forget, retain))
    recipe = small(basis, mean="free")
    edit = unmerge.fit(model, batched(forget, 17), batched(retain, 31), init="zero", recipe=recipe)
    expected = reference.unmerge(model, ["0"], forget, retain, recipe)["0"]
    found = edit.layers["0"].Q.double()
    cosines = torch.linalg.svdvals(found.T @ expected.forget_basis[0])
    assert cosines.min() > 1 - 1e-4
    task = (edit.layers["0"].B @ edit.layers["0"].Q.T).double()
    assert (task - expected.forget_task[0]).norm() < 1e-2 * expected.forget_task[0].norm()


# The head


def test_a_class_request_removes_the_forgotten_rows_by_default() -> None:
    model = networks.mlp((6, 8, 5))
    forget, retain = request((6,), forgotten=(1, 3), kept=(0, 2, 4))
    recipe = small("lda", head="auto")
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert (edit.head, edit.removed, edit.alpha) == ("2", (1, 3), 1.0)
    expected = reference.edited(model, reference.unmerge(model, ["0", "2"], forget, retain, recipe), recipe, alpha=1.0)
    expected["2.weight"][[1, 3]] = 0
    expected["2.bias"][[1, 3]] = -1e4
    with edit.applied(model):
        for name, tensor in model.state_dict().items():
            assert close(tensor, expected[name], 1e-8), name
        assert not torch.isin(model(forget[0]).argmax(1), torch.tensor([1, 3])).any()


@pytest.mark.parametrize("head", ["edit", "keep"])
def test_the_head_is_edited_like_a_layer_or_left_alone(head: str) -> None:
    model = networks.mlp((6, 8, 5))
    forget, retain = request((6,))
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(head=head))
    assert edit.removed == ()
    assert edit.alpha is None
    assert ("2" in edit.layers) == (head == "edit")


def test_samples_of_retained_classes_are_no_class_request() -> None:
    model = networks.mlp((6, 8, 5))
    forget, retain = request((6,), forgotten=(0,), kept=(1, 2))
    retain = together((forget[0][:3], forget[1][:3]), retain)
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(head="auto"))
    assert edit.removed == ()
    assert "whole classes" in edit.provenance["notes"]["head_not_removed"]
    with pytest.raises(EditError, match="head='edit'"):
        unmerge.fit(model, [forget], [retain], init="zero", recipe=small(head="remove"))


# The paper's configurations


# Its table of configurations: rank, skip-layers, α, λ and the first edited layer of a ResNet-50.
CELLS = {
    ("pca", "pretrained"): (64, 45, 1.6, 5.0, "layer4.0.conv3"),
    ("cav-kmeans", "pretrained"): (16, 35, 2.5, 5.0, "layer3.3.conv2"),
    ("cav-class", "pretrained"): (16, 35, 2.5, 5.0, "layer3.3.conv2"),
    ("pca", "zero"): (128, 45, 1.25, 50.0, "layer4.0.conv3"),
    ("cav-kmeans", "zero"): (16, 40, 1.0, 50.0, "layer3.5.conv1"),
    ("cav-class", "zero"): (16, 40, 1.3, 50.0, "layer3.5.conv1"),
}


@pytest.mark.parametrize(("variant", "init"), CELLS)
def test_the_paper_cells_fit_and_apply(variant: str, init: str) -> None:
    model = networks.resnet50_tree(width=6)
    forget, retain = request((3, 32, 32), forgotten=(0, 1), kept=(2, 3), each=8, dtype=torch.float32)
    recipe = Recipe.paper(variant, init=init)
    start = "zero" if init == "zero" else given_init(model)
    before = copy.deepcopy(model.state_dict())
    data = batched(forget, 8), batched(retain, 8)
    if variant == "cav-class":
        edit = unmerge.fit(model, *data, init=start, recipe=recipe, check_init=False)
    else:  # the ranks are for wide layers
        with pytest.warns(UnmergeWarning, match="reduced"):
            edit = unmerge.fit(model, *data, init=start, recipe=recipe, check_init=False)
    rank, skipped, alpha, lam, first = CELLS[variant, init]
    assert (recipe.rank, recipe.alpha, recipe.lam, recipe.gamma) == (rank, alpha, lam, 0.5)
    assert len(edit.layers) == 53 - skipped + 1
    assert next(iter(edit.layers)) == first
    edit.apply(model)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in edit.layers} | {"fc.bias"}
    shrunk = 1 - recipe.alpha * 0.5 / 1.5
    initial = torch.zeros(4) if init == "zero" else start["fc.bias"]
    assert torch.allclose(after["fc.bias"], initial + shrunk * (before["fc.bias"] - initial), atol=1e-6)
    assert model(retain[0]).isfinite().all()
    edit.revert(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("init", ["zero", "pretrained"])
@pytest.mark.parametrize("variant", ["pca", "cav-class"])
def test_the_paper_cells_are_the_reference_on_a_small_net(variant: str, init: str) -> None:
    model = networks.mlp((7, 9, 8, 5))
    forget, retain = request((7,), forgotten=(1, 3), kept=(0, 2, 4), each=9)
    recipe = Recipe.paper(variant, init=init).but(skip_layers=0, rank=4, retain_rank=4)
    start = None if init == "zero" else given_init(model)
    agrees_with_reference(model, forget, retain, recipe, start, alpha=recipe.alpha)


# What fit leaves behind


@pytest.fixture
def fitted() -> tuple[nn.Module, Edit, dict[str, Tensor]]:
    """A model in training mode after fit, the edit, and its state from before."""
    model = networks.cnn().train()
    before = copy.deepcopy(model.state_dict())
    forget, retain = request((3, 6, 6), forgotten=(0,), kept=(1, 2, 3))
    state = torch.random.get_rng_state()
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small(head="auto"))
    assert torch.equal(state, torch.random.get_rng_state())
    return model, edit, before


def test_fit_leaves_the_model_as_it_was(fitted: tuple[nn.Module, Edit, dict[str, Tensor]]) -> None:
    model, _, before = fitted
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_edit_says_what_it_was_made_from(fitted: tuple[nn.Module, Edit, dict[str, Tensor]]) -> None:
    _, edit, _ = fitted
    assert edit.provenance["samples"] == {"forget": 8, "retain": 24}
    assert edit.provenance["classes"] == [0]
    assert set(edit.provenance["seconds"]) == {"statistics", "bases", "solve"}
    assert edit.provenance["notes"]["left_out"] == {}


def test_a_predicate_is_stored_as_the_names_it_selects() -> None:
    model = networks.mlp()
    forget, retain = request((6,))
    recipe = small(layers=lambda name, module: name != "2")
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=recipe)
    assert list(edit.layers) == ["0", "4"]
    assert list(edit.recipe.layers) == ["0", "4"]


def test_layers_that_share_their_input_have_one_basis() -> None:
    model = networks.hf_vit()
    forget, retain = request((3, 8, 8))
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=small())
    query, key = (edit.layers[f"vit.layers.0.attention.{part}_proj"] for part in "qk")
    assert torch.equal(query.Q, key.Q)
    assert not torch.equal(query.B, key.B)


@pytest.mark.parametrize(("network", "shape"), [(networks.mlp, (6,)), (networks.cnn, (3, 6, 6))])
def test_what_is_said_of_blend_names_convolutions_where_there_are_some(network, shape):
    forget, retain = request(shape, each=6)
    edit = unmerge.fit(network(), [forget], [retain], init="zero", recipe=Recipe(skip_layers=0))
    assert edit.recipe.basis == "blend"
    assert ("convolutions" in edit.provenance["choices"]["basis"]) is (network is networks.cnn)
