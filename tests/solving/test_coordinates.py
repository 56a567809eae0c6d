"""A sketched layer against the same layer with its Gram: equal where the sketch holds all, near where it holds most."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.testing import assert_close

from unmerge import Moments, Recipe, Statistics, collect, diagnose, fit
from unmerge.collecting.accumulation import LayerStatistics
from unmerge.errors import LayerError, StatisticsError, UnmergeWarning
from unmerge.requests.gathering import pair_of
from unmerge.solving.coordinates import Coordinates
from unmerge.solving.directions import directions
from unmerge.solving.pooling import pools_of
from unmerge.sums.sketching import SketchedMoments

WIDE, FEW, SIZE = 320, 12, 60
LAYER = "1"


def drawn(n: int, seed: int, first: int, noise: float) -> Tensor:
    """Rows of some dimensions out of many, of falling variance, with noise in all."""
    generator = torch.Generator().manual_seed(seed)
    frame = torch.linalg.qr(torch.randn(WIDE, 3 * FEW, generator=torch.Generator().manual_seed(99)).double())[0]
    spread = torch.linspace(3, 1, 2 * FEW).double()
    weights = torch.randn(n, 2 * FEW, generator=generator).double() * spread
    return weights @ frame[:, first : first + 2 * FEW].mT + noise * torch.randn(n, WIDE, generator=generator).double()


def data(noise: float, labels: bool) -> tuple[list, list]:
    """Forget and retain batches of 2 and 4 classes that differ in their means."""
    sides = []
    for seed, first, classes in ((0, 0, (0, 1)), (1, FEW, (2, 3, 4, 5))):
        rows = drawn(400 * len(classes), seed, first, noise)
        kinds = torch.arange(len(rows)) % len(classes) + classes[0]
        rows = rows + 2 * drawn(6, 7, FEW // 2, 0)[kinds]
        parts = zip(rows.split(100), kinds.split(100), strict=True)
        sides.append([(part, own) if labels else part for part, own in parts])
    return sides[0], sides[1]


def wide_model(width: int = WIDE) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Linear(width, 6)).double()


def both_sides(model: nn.Module, noise: float, recipe: Recipe, labels: bool = True) -> tuple[Statistics, Statistics]:
    forget, retain = data(noise, labels)
    keep = {"per_class": "full"} if recipe.basis == "cav-class" else {}
    keep |= {"sample": 200} if recipe.basis == "cav-kmeans" else {}
    first = collect(model, forget, [LAYER], **keep)
    return first, collect(model, retain, first)


def test_all_of_inputs_with_few_dimensions_is_known():
    forget, retain = drawn(300, 0, 0, 0.0) + 5, drawn(500, 1, FEW, 0.0)
    sides = [LayerStatistics(SketchedMoments(SIZE).update(rows)) for rows in (retain, forget)]
    found = Coordinates.of(sides, sides)
    span = found.span
    assert span.shape[1] == 3 * FEW + 1, "both ranges and the shift between the means"
    assert_close(span.mT @ span, torch.eye(span.shape[1]).double())
    for side, rows in zip(sides, (retain, forget), strict=True):
        reduced, share = found.reduced(side)
        assert share == pytest.approx(1)
        exact = Moments.of(rows)
        assert_close(span @ reduced.moments.scatter @ span.mT, exact.scatter, rtol=1e-6, atol=1e-6)
        assert_close(found.lifted(reduced.moments.mean.unsqueeze(1))[:, 0], exact.mean)


def test_noise_that_is_the_same_in_all_directions_is_known_too():
    rows = 3 * torch.cat([torch.eye(WIDE), -torch.eye(WIDE)]).double()
    sides = [LayerStatistics(SketchedMoments(40).update(rows))]
    found = Coordinates.of(sides, sides)
    reduced, share = found.reduced(sides[0])
    assert_close(reduced.moments.scatter, 18 * torch.eye(40).double())
    assert share == pytest.approx(40 / WIDE)


def test_what_lies_within_classes_stays_positive():
    torch.manual_seed(1)
    kinds = torch.arange(400) % 30
    rows = 20 * torch.randn(30, WIDE).double()[kinds] + torch.randn(400, WIDE).double()
    sums = torch.zeros(30, WIDE).double().index_add_(0, kinds, rows)
    layer = LayerStatistics(SketchedMoments(20).update(rows), torch.bincount(kinds).double(), sums)
    found = Coordinates.of([layer], [layer])
    reduced, share = found.reduced(layer)
    assert share > 0.98, "a sketch of 20 columns alone would hold 2 thirds of 30 means"
    means = reduced.class_sums / layer.class_rows.unsqueeze(1) - reduced.moments.mean
    between = means.mT @ (means * layer.class_rows.unsqueeze(1))
    within = torch.linalg.eigvalsh(reduced.moments.scatter - between)
    assert within.min() > -1e-9 * within.max()


@pytest.mark.parametrize("noise", [0.0, 1e-4])
@pytest.mark.parametrize(
    ("basis", "labels"),
    [
        ("pca", False),
        ("deflated-pca", False),
        ("contrastive", False),
        ("wiener", False),
        ("lda", False),
        ("lda", True),
        ("cav-class", True),
        ("cav-kmeans", False),
        ("private-mean", True),
        ("blend", True),
    ],
)
def test_an_edit_of_few_dimensions_and_little_noise_is_the_exact_one(basis, labels, noise):
    model = wide_model()
    recipe = Recipe(basis=basis, layers=[LAYER], rank=6, retain_rank=6, deflate=6, head="edit")
    forget, retain = both_sides(model, noise, recipe, labels)
    exact = fit(model, forget, retain, init="zero", recipe=recipe, on_verdict="ignore")
    sketch = fit(model, forget.sketched({LAYER: SIZE}), retain, init="zero", recipe=recipe, on_verdict="ignore")
    assert sketch.provenance["notes"]["sketches"][LAYER]["size"] == SIZE
    change, expected = ((edit.layers[LAYER].B @ edit.layers[LAYER].Q.mT) for edit in (sketch, exact))
    assert (change - expected).norm() < (1e-5 if noise == 0 else 1e-2) * expected.norm()
    assert_close(sketch.layers[LAYER].shift, exact.layers[LAYER].shift, rtol=1e-2, atol=5e-3)
    basis_found = sketch.layers[LAYER].Q
    assert_close(basis_found.mT @ basis_found, torch.eye(basis_found.shape[1]).double())


def test_a_class_is_forgotten_from_the_sketch_of_everything():
    model, recipe = wide_model(), Recipe(layers=[LAYER], basis="blend", head="edit")
    everything = collect(model, [batch for side in data(0.0, True) for batch in side], [LAYER])
    options = {"classes": [0, 1], "init": "zero", "recipe": recipe}
    exact = fit(model, statistics=everything, **options).layers[LAYER]
    sketch = fit(model, statistics=everything.sketched({LAYER: SIZE}), **options).layers[LAYER]
    assert_close(sketch.B @ sketch.Q.mT, exact.B @ exact.Q.mT, rtol=1e-4, atol=1e-5)


def digits(width: int) -> tuple[nn.Module, list, list]:
    """Real digits through one wide layer with random weights; the next layer's inputs are sketched."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float() / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    kept = labels != 3
    return model, [(images[~kept], labels[~kept])], [(images[kept], labels[kept])]


@pytest.mark.parametrize("size", [64, 128])
def test_bases_of_real_digits_hold_what_the_exact_ones_hold(size):
    model, forget, retain = digits(768)
    first = collect(model, forget, ["2"])
    second = collect(model, retain, first)
    exact = pair_of(model, first, second, Recipe())
    sketch = pair_of(model, first.sketched({"2": size}), second, Recipe())
    lost, kept = (side["2"].moments for side in (first, second))
    scatter = lost.scatter.double()
    about_retain = lost.scatter_about(kept.mean).double()

    def energies(basis: str, matrix: Tensor) -> list[Tensor]:
        recipe = Recipe(basis=basis, deflate=8)
        found = [directions(pools_of(request, "2"), recipe).forget for request in (sketch, exact)]
        return [(q * (matrix @ q)).sum() for q in found]

    (mine, theirs) = energies("pca", scatter)
    assert 0.99 < mine / theirs < 1 + 1e-6
    (mine, theirs) = energies("contrastive", about_retain)
    assert mine > 0.99 * theirs

    # Deflated: what is left once the leading retain directions are projected out.
    vectors = torch.linalg.eigh(kept.scatter.double())[1]
    outside = torch.eye(768).double() - vectors[:, -8:] @ vectors[:, -8:].mT
    (mine, theirs) = energies("deflated-pca", outside @ scatter @ outside)
    assert 0.99 < mine / theirs < 1 + 1e-3

    # lda: the squared distance of the means for the variance along the direction, ridge included. The weaker the
    # ridge, the more it asks of directions that a sketch does not hold.
    joint = (lost + kept).scatter.double()
    shift = lost.mean - kept.mean
    for ridge, least in ((1.0, 0.98), (1e-2, 0.88)):
        system = joint + ridge * joint.diagonal().mean() * torch.eye(768)
        recipe = Recipe(basis="lda", ridge=ridge)
        found = [directions(pools_of(request, "2"), recipe).forget[:, 0] for request in (sketch, exact)]
        mine, theirs = ((q @ shift).square() / (q @ system @ q) for q in found)
        assert least < mine / theirs < 1 + 1e-6


def test_the_verdict_of_a_sketched_layer_is_that_of_the_exact_one():
    model, forget, retain = digits(512)
    recipe = Recipe(layers=["2"], basis="pca", head="edit")
    unlabelled = [[inputs for inputs, _ in side] for side in (forget, retain)]
    exact = fit(model, *unlabelled, init="zero", recipe=recipe).provenance
    sketch = fit(model, *unlabelled, init="zero", recipe=recipe, memory="6MB").provenance
    assert sketch["plan"]["sketches"].keys() == {"2"}
    size = sketch["plan"]["sketches"]["2"]
    facts = sketch["notes"]["sketches"]["2"]
    assert facts["size"] == size
    assert 0.9 < facts["forget"] <= 1
    assert sketch["notes"]["approximations"] == [
        f"2: a sketch of size {size}, {min(facts['forget'], facts['retain']):.1%} of the variance"
    ]
    assert sketch["verdict"]["kind"] == exact["verdict"]["kind"]
    assert sketch["verdict"]["separability"] == pytest.approx(exact["verdict"]["separability"], rel=0.02)
    assert sketch["verdict"]["control"] == pytest.approx(exact["verdict"]["control"], rel=0.2)
    assert sketch["verdict"]["shift"] == pytest.approx(exact["verdict"]["shift"], rel=1e-6)
    assert "sketches" not in exact["notes"]


def test_a_sketch_that_holds_little_is_warned_of():
    torch.manual_seed(0)
    model = wide_model()
    forget, retain = [torch.randn(200, WIDE).double() + 0.5], [torch.randn(500, WIDE).double()]
    first = collect(model, forget, [LAYER]).sketched({LAYER: 40})
    with pytest.warns(
        UnmergeWarning, match=r"less than 90% of their inputs' variance.*: 1 \d\d%. Pass a larger memory="
    ):
        fit(model, first, collect(model, retain, first), init="zero", recipe=Recipe(basis="pca"), on_verdict="ignore")


def test_a_diagnosis_of_a_sketch_is_refused():
    model = wide_model()
    forget, retain = both_sides(model, 0.0, Recipe())
    with pytest.raises(StatisticsError, match=r"1 were sketched to fit the memory, and a diagnosis needs"):
        diagnose(forget.sketched({LAYER: 40}), retain, model)


def test_inputs_that_never_change_have_no_direction():
    model = wide_model()
    zeros = [torch.zeros(20, WIDE).double()]
    first = collect(model, zeros, [LAYER]).sketched({LAYER: 40})
    with pytest.raises(LayerError, match="has no forget direction"):
        fit(model, first, collect(model, zeros, first), init="zero", recipe=Recipe(basis="lda"), on_verdict="ignore")
