"""search_alpha(): few evaluations give what the whole grid gives, and nothing of the model changes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import networks
import unmerge
from unmerge import AlphaSearch, Edit, LayerEdit, Recipe, search_alpha
from unmerge.bench.digits import Split, load_digits, train
from unmerge.editing.searching import EVALUATIONS, Point
from unmerge.errors import DataError, EditError, UnmergeWarning
from unmerge.measures import accuracy, divergence
from unmerge.model.ledger import ledger_of
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint

TRAIN, TEST = load_digits()
FORGET, RETAIN = TRAIN.only(3), TEST.without(3)
STEP = 0.05
GRID = [round(place * STEP, 10) for place in range(201)]  # up to the default max_alpha of 10
RECIPES = {
    "lda": Recipe(basis="lda", head="edit"),
    "pca": Recipe(basis="pca", rank=8, lam=1.0, mean="free", head="edit"),
    "cav": Recipe(basis="cav-class", centering="retain", lam=2.0, head="edit"),
    "weak pca": Recipe(basis="pca", head="edit"),
}


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return train(TRAIN, epochs=6)


@pytest.fixture(scope="module")
def retrained() -> nn.Module:
    return train(TRAIN.without(3), seed=1, epochs=4)


@pytest.fixture(scope="module")
def edits(model: nn.Module) -> dict[str, Edit]:
    forget, retain = FORGET.loader(), TRAIN.without(3).loader()
    return {name: unmerge.fit(model, forget, retain, init="zero", recipe=knobs) for name, knobs in RECIPES.items()}


@torch.no_grad()
def edited_logits(model: nn.Sequential, edit: Edit, alpha: float, hidden: Tensor) -> Tensor:
    """The logits at one strength, written out for the two layers of the digits network that the edits change."""
    conv, norm, head = model[6], model[7], model[11]
    first, last = edit.layers["6"], edit.layers["11"]
    zero = torch.zeros(())
    weight = conv.weight - alpha * (first.B @ first.Q.T).reshape(conv.weight.shape)
    mean = norm.running_mean - alpha * (zero if first.shift is None else first.shift)
    hidden = functional.conv2d(hidden, weight, padding=1)
    hidden = functional.batch_norm(hidden, mean, norm.running_var, norm.weight, norm.bias)
    bias = head.bias + alpha * (zero if last.shift is None else last.shift)
    return functional.linear(hidden.relu().mean((2, 3)), head.weight - alpha * last.B @ last.Q.T, bias)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Every strength of the grid: accuracies, and the forget logits."""

    forget: list[float]
    retain: list[float]
    logits: list[Tensor]

    def first(self, target: float) -> float | None:
        return next((alpha for alpha, share in zip(GRID, self.forget, strict=True) if share <= target), None)


@pytest.fixture(scope="module")
def curves(model: nn.Sequential, edits: dict[str, Edit]) -> dict[str, Curve]:
    """By brute force."""
    with torch.no_grad():
        inputs = {name: model[:6](split.images) for name, split in (("forget", FORGET), ("retain", RETAIN))}
    found = {}
    for name, edit in edits.items():
        assert set(edit.layers) == {"6", "11"}
        logits = [edited_logits(model, edit, alpha, inputs["forget"]) for alpha in GRID]
        kept = [edited_logits(model, edit, alpha, inputs["retain"]) for alpha in GRID]
        shares = [(part.argmax(1) == FORGET.labels).double().mean().item() for part in logits]
        retained = [(part.argmax(1) == RETAIN.labels).double().mean().item() for part in kept]
        found[name] = Curve(shares, retained, logits)
    return found


def on_curve(found: AlphaSearch, curve: Curve) -> None:
    """Assert that every point that was measured is the grid's."""
    assert [point.alpha for point in found.curve] == sorted({point.alpha for point in found.curve})
    for point in found.curve:
        place = GRID.index(point.alpha)
        assert point.forget == pytest.approx(curve.forget[place])
        assert point.retain is None or point.retain == pytest.approx(curve.retain[place])


# The smallest alpha that forgets


@pytest.mark.parametrize("target", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", RECIPES)
def test_the_answer_is_that_of_the_whole_grid(
    model: nn.Module, edits: dict[str, Edit], curves: dict[str, Curve], name: str, target: float
) -> None:
    before, expected = bits(model), curves[name].first(target)
    with nullcontext() if expected is not None else pytest.warns(UnmergeWarning, match="searched up to 10"):
        found = search_alpha(edits[name], model, FORGET.loader(), target)
    if expected is None:  # the weak edit may not get there
        assert name == "weak pca"
        assert (found.alpha, found.reached, found.stopped_by) == (10.0, False, "max_alpha")
    else:
        assert (found.alpha, found.reached, found.stopped_by) == (expected, True, "target")
    assert len(found.curve) <= EVALUATIONS == 12
    on_curve(found, curves[name])
    assert same_bits(model, before)


@pytest.mark.parametrize(
    ("name", "max_drop"),
    # Without any drop only where retain accuracy does not waver by a sample before it falls.
    [("pca", 0.0), *((name, drop) for name in RECIPES for drop in (0.02, 0.3))],
)
def test_retain_accuracy_bounds_the_answer_as_on_the_whole_grid(
    model: nn.Module, edits: dict[str, Edit], curves: dict[str, Curve], name: str, max_drop: float
) -> None:
    curve = curves[name]
    lowest = curve.retain[0] - max_drop
    # On a curve that falls: the first strength that forgets, or the last before retain is too low.
    forgets = next((place for place, share in enumerate(curve.forget) if share <= 0.01), math.inf)
    too_low = next((place for place, share in enumerate(curve.retain) if share < lowest), math.inf)
    if forgets < too_low:
        expected, why = (forgets, True, "target"), None
    elif too_low < math.inf:
        expected, why = (too_low - 1, False, "retain"), f"retain may drop by {max_drop:g} at most"
    else:  # the weak edit may do neither
        expected, why = (len(GRID) - 1, False, "max_alpha"), "alpha is searched up to 10"
    refused = rf"no alpha brings the forget measure to 0\.01: .* {why}"
    with nullcontext() if why is None else pytest.warns(UnmergeWarning, match=refused):
        found = search_alpha(edits[name], model, FORGET.loader(), retain=RETAIN.loader(), max_drop=max_drop)
    assert (GRID.index(found.alpha), found.reached, found.stopped_by) == expected
    assert found.point.retain is not None
    assert found.point.retain >= lowest
    assert len(found.curve) <= EVALUATIONS
    on_curve(found, curve)


def test_of_the_edits_above_some_are_bounded_by_retain_and_some_by_the_target(curves: dict[str, Curve]) -> None:
    for name, bounded in (("lda", False), ("cav", False), ("pca", True)):
        curve = curves[name]
        forgets = next(place for place, share in enumerate(curve.forget) if share <= 0.01)
        assert (curve.retain[forgets] < curve.retain[0] - 0.02) is bounded


def test_when_no_alpha_reaches_the_target_the_best_is_returned_with_a_warning(
    model: nn.Module, edits: dict[str, Edit], curves: dict[str, Curve]
) -> None:
    place = GRID.index(1.0)
    shown = f"{curves['lda'].forget[place]:.4f}"
    with pytest.warns(UnmergeWarning) as caught:
        found = search_alpha(edits["lda"], model, FORGET.loader(), max_alpha=1.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert message.startswith(f"no alpha brings the forget measure to 0.01: it is {shown} at alpha=1, and alpha is")
    assert "searched up to 1" in message
    assert "unmerge.diagnose" in message
    assert (found.alpha, found.reached, found.stopped_by) == (1.0, False, "max_alpha")
    assert found.point.forget == pytest.approx(curves["lda"].forget[place])


def test_a_model_that_has_forgotten_already_needs_no_strength(model: nn.Module, edits: dict[str, Edit]) -> None:
    wrong = [(FORGET.images, (FORGET.labels + 1) % 10)]
    found = search_alpha(edits["lda"], model, wrong, target=0.05)
    assert (found.alpha, found.reached, len(found.curve)) == (0.0, True, 1)


def test_rows_that_the_edit_removes_stay_in_meanwhile(model: nn.Module, edits: dict[str, Edit]) -> None:
    forget, retain = FORGET.loader(), TRAIN.without(3).loader()
    removing = unmerge.fit(model, forget, retain, init="zero", recipe=RECIPES["lda"].but(head="remove"))
    assert removing.removed == (3,)
    seen: list[float] = []

    def watched(changed: nn.Module, data: Any) -> float:
        seen.append(changed.get_parameter("11.bias")[3].item())
        return accuracy(changed, data)

    found = search_alpha(removing, model, forget, metric=watched)
    assert len(seen) == len(found.curve)
    assert min(seen) > -100
    assert found.to_dict() == search_alpha(edits["lda"], model, forget).to_dict()


def test_a_head_whose_bias_only_the_removal_changes_can_be_searched(model: nn.Module) -> None:
    forget, retain = FORGET.loader(), TRAIN.without(3).loader()
    recipe = RECIPES["lda"].but(mean="free")
    edit, removing = (
        unmerge.fit(model, forget, retain, init="zero", recipe=recipe.but(head=head)) for head in ("edit", "remove")
    )
    assert removing.layers["11"].shift is None
    assert "11.bias" in removing.weights
    found, expected = (search_alpha(which, model, forget, target=0.3) for which in (removing, edit))
    assert found.to_dict() == expected.to_dict()


def test_rows_that_another_edit_has_removed_stay_removed(model: nn.Module, edits: dict[str, Edit]) -> None:
    model = copy.deepcopy(model)
    forget, retain = TRAIN.only(5).loader(), TRAIN.without(5).loader()
    other = unmerge.fit(model, forget, retain, init="zero", recipe=Recipe(basis="lda"))
    other.apply(model)
    before, seen = bits(model), set()

    def watched(changed: nn.Module, data: Any) -> float:
        seen.add(changed.get_parameter("11.bias")[5].item())
        return accuracy(changed, data)

    found = search_alpha(edits["lda"], model, FORGET.loader(), metric=watched)
    assert found.reached
    assert seen == {-1e4}
    assert same_bits(model, before)
    assert [entry.edit for entry in ledger_of(model).entries] == [other]


def test_recalibration_takes_place_at_every_strength(model: nn.Module, edits: dict[str, Edit]) -> None:
    before = bits(model)
    retain = TRAIN.without(3).loader()
    found = search_alpha(edits["lda"], model, FORGET.loader(), recalibrate=retain)
    assert same_bits(model, before)
    assert found.reached
    for point in found.curve[1:]:
        with edits["lda"].applied(model, point.alpha, recalibrate=retain):
            assert point.forget == accuracy(model, FORGET.loader())
    plain = search_alpha(edits["lda"], model, FORGET.loader())
    assert [point.forget for point in plain.curve] != [point.forget for point in found.curve]


def test_the_refit_sees_what_is_forgotten_at_every_strength(model: nn.Module) -> None:
    retain, forget = TRAIN.without(3).loader(), FORGET.loader()
    edit = unmerge.fit(model, forget, retain, init="zero", recipe=Recipe(head="edit"))
    # The divergence feels any change, unlike the share of right answers.
    other = train(TRAIN.without(3), seed=1, epochs=1)
    options = {"recalibrate": retain, "max_alpha": 1.0, "step": 0.5}
    found = search_alpha(edit, model, forget, score="kl", reference=other, **options)
    assert len(found.curve) > 1
    for point in found.curve[1:]:
        with edit.applied(model, point.alpha, recalibrate=retain, forget=forget):
            assert point.score == -divergence(model, other, forget)
        with edit.applied(model, point.alpha, recalibrate=retain):
            assert abs(point.score + divergence(model, other, forget)) > 1e-3
    # What a metric reads is its own business.
    unlabelled = [images for images, _ in forget]
    by_metric = search_alpha(edit, model, unlabelled, 0.9, metric=lambda *_: 0.5, **options)
    assert by_metric.reached


# Other measures


def test_a_metric_takes_the_place_of_accuracy(
    model: nn.Module, edits: dict[str, Edit], curves: dict[str, Curve]
) -> None:
    calls: list[Any] = []

    def confidence(changed: nn.Module, data: list[Tensor]) -> float:
        calls.append(data)
        with torch.no_grad():
            return changed(data[0]).softmax(1)[:, 3].mean().item()

    data = [FORGET.images]  # no label
    found = search_alpha(edits["cav"], model, data, target=0.2, metric=confidence)
    wanted = [logits.softmax(1)[:, 3].mean().item() for logits in curves["cav"].logits]
    assert found.alpha == next(alpha for alpha, value in zip(GRID, wanted, strict=True) if value <= 0.2)
    assert len(calls) == len(found.curve) <= EVALUATIONS
    assert all(given is data for given in calls)
    for point in found.curve:
        assert point.forget == pytest.approx(wanted[GRID.index(point.alpha)], abs=1e-5)


def scores(kind: str, curve: Curve, reference: nn.Module) -> list[float]:
    """The score at every strength of the grid."""
    with torch.no_grad():
        theirs = {name: reference(split.images) for name, split in (("forget", FORGET), ("retain", RETAIN))}
    if kind == "kl":
        wanted = theirs["forget"].double().log_softmax(1)
        logs = [logits.double().log_softmax(1) for logits in curve.logits]
        return [-(own.exp() * (own - wanted)).sum(1).mean().item() for own in logs]
    known = {
        name: (theirs[name].argmax(1) == split.labels).double().mean().item()
        for name, split in (("forget", FORGET), ("retain", RETAIN))
    }
    pairs = zip(curve.forget, curve.retain, strict=True)
    if kind == "kodge":
        return [retain * (1 - forget) for forget, retain in pairs]
    return [(1 - abs(forget - known["forget"])) * (1 - abs(retain - known["retain"])) for forget, retain in pairs]


@pytest.mark.parametrize("name", ["lda", "pca", "cav"])
@pytest.mark.parametrize("kind", ["kodge", "tow", "kl"])
def test_a_score_finds_the_best_of_the_whole_grid(
    model: nn.Module,
    edits: dict[str, Edit],
    curves: dict[str, Curve],
    retrained: nn.Module,
    kind: str,
    name: str,
) -> None:
    before = bits(model), bits(retrained)
    expected = scores(kind, curves[name], retrained)
    found = search_alpha(edits[name], model, FORGET.loader(), retain=RETAIN.loader(), score=kind, reference=retrained)
    assert len(found.curve) <= EVALUATIONS
    assert (found.score, found.stopped_by) == (kind, "best score")
    assert found.reached == (found.point.forget <= 0.01)
    on_curve(found, curves[name])
    for point in found.curve:
        assert point.score == pytest.approx(expected[GRID.index(point.alpha)], abs=1e-4)
    assert found.point.score == max(point.score for point in found.curve)
    best = GRID[expected.index(max(expected))]
    is_near = abs(found.alpha - best) <= 2 * STEP  # a sharp peak falls by much in a step
    assert is_near or found.point.score == pytest.approx(max(expected), abs=0.01)
    assert same_bits(model, before[0])
    assert same_bits(retrained, before[1])


def test_accuracies_of_a_reference_stand_for_the_model(
    model: nn.Module, edits: dict[str, Edit], retrained: nn.Module
) -> None:
    data = {"forget": FORGET.loader(), "retain": RETAIN.loader()}
    known = {name: accuracy(retrained, part) for name, part in data.items()}
    found = [
        search_alpha(edits["lda"], model, data["forget"], retain=data["retain"], score="tow", reference=reference)
        for reference in (retrained, known)
    ]
    assert found[0].to_dict() == found[1].to_dict()


def test_accuracy_and_divergence_equal_their_definitions(model: nn.Module, retrained: nn.Module) -> None:
    mixed = Split(TEST.images, TEST.labels)
    right = model(mixed.images).argmax(1) == mixed.labels
    assert accuracy(model, mixed.loader(100)) == pytest.approx(right.double().mean().item())
    assert divergence(model, model, mixed.loader(100)) == pytest.approx(0, abs=1e-9)
    mine, theirs = (which(mixed.images).double().log_softmax(1) for which in (model, retrained))
    expected = functional.kl_div(theirs, mine, reduction="batchmean", log_target=True)  # KL(mine ‖ theirs)
    assert divergence(model, retrained, mixed.loader(100)) == pytest.approx(expected.item(), rel=1e-5)


def test_models_that_return_more_than_logits_are_read() -> None:
    model = networks.hf_vit(classes=3)
    forget, retain = networks.request((3, 8, 8), each=6)
    logits = model(forget[0]).logits
    assert accuracy(model, [forget]) == pytest.approx((logits.argmax(1) == forget[1]).double().mean().item())
    edit = unmerge.fit(model, [forget], [retain], init="zero", recipe=Recipe(basis="lda", head="edit"))
    found = search_alpha(edit, model, [{"pixel_values": forget[0], "labels": forget[1]}], target=0.9, max_alpha=50)
    assert found.point.forget <= 0.9


# Any curve: an edit of one number, by which a metric reads alpha off the weight


def dial(layer: str = "0") -> tuple[nn.Module, Edit]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(model[0].weight, 100.0)
    one = torch.ones(1, 1, dtype=torch.float64)
    edit = Edit({layer: LayerEdit(one, one)}, Recipe(), None, weights=fingerprint(state_of(model)))
    return model, edit


def reading(model: nn.Module) -> float:
    return round(100.0 - model.get_parameter("0.weight").item(), 9)


@settings(max_examples=60, deadline=None)
@given(forgets=st.floats(0.001, 10.0))
def test_any_falling_curve_is_answered_exactly_in_twelve_evaluations(forgets: float) -> None:
    model, edit = dial()
    calls: list[float] = []

    def metric(changed: nn.Module, data: Any) -> float:
        calls.append(reading(changed))
        return 0.0 if calls[-1] >= forgets else 1 - calls[-1] / 11

    found = search_alpha(edit, model, ["forget"], metric=metric)
    assert found.alpha == next(alpha for alpha in GRID if alpha >= forgets)
    assert len(calls) == len(found.curve) <= EVALUATIONS
    assert sorted(calls) == [point.alpha for point in found.curve]
    assert reading(model) == 0


@settings(max_examples=60, deadline=None)
@given(forgets=st.floats(0.001, 12.0), breaks=st.floats(0.001, 12.0), drop=st.floats(0, 0.5))
def test_what_comes_first_on_any_falling_curve_stops_the_search(forgets: float, breaks: float, drop: float) -> None:
    model, edit = dial()

    def metric(changed: nn.Module, data: list[str]) -> float:
        alpha = reading(changed)
        if data == ["retain"]:
            return 0.9 - (drop + 0.01) * (alpha >= breaks)
        return float(alpha < forgets)

    lost, broken = (next((a for a in GRID if a >= limit), math.inf) for limit in (forgets, breaks))
    options: dict[str, Any] = {"retain": ["retain"], "metric": metric, "max_drop": drop}
    if lost < broken:
        found = search_alpha(edit, model, ["forget"], **options)
        assert (found.alpha, found.stopped_by, found.reached) == (lost, "target", True)
    else:
        why = r"retain may drop" if broken < math.inf else "searched up to 10"
        with pytest.warns(UnmergeWarning, match=why):
            found = search_alpha(edit, model, ["forget"], **options)
        expected = (GRID[GRID.index(broken) - 1], "retain") if broken < math.inf else (10.0, "max_alpha")
        assert (found.alpha, found.stopped_by, found.reached) == (*expected, False)
    assert len(found.curve) <= EVALUATIONS


@pytest.mark.parametrize("breaks", [math.inf, 5.0])
@pytest.mark.parametrize("lowest", [0.0, 0.2])
def test_a_forget_measure_that_rises_again_is_taken_at_its_lowest(lowest: float, breaks: float) -> None:
    """As with an edit that is driven far beyond what it removes, also where retain has fallen too far by then."""
    model, edit = dial()

    def metric(changed: nn.Module, data: list[str]) -> float:
        if data == ["retain"]:
            return float(reading(changed) < breaks)
        return lowest + max(0.0, abs(reading(changed) - 2.7) - 0.1) / 4

    with nullcontext() if lowest == 0 else pytest.warns(UnmergeWarning, match="no alpha brings"):
        found = search_alpha(edit, model, ["forget"], retain=["retain"], metric=metric)
    assert found.alpha == pytest.approx(2.7, abs=0.16)
    assert found.reached == (lowest == 0)
    assert len(found.curve) <= EVALUATIONS


def test_in_a_dip_the_smallest_alpha_that_forgets_is_taken() -> None:
    model, edit = dial()

    def metric(changed: nn.Module, data: list[str]) -> float:
        return 0.001 + 0.01 * (reading(changed) - 3) ** 2  # at most .01 from 2.05 on

    found = search_alpha(edit, model, ["forget"], metric=metric)
    assert (found.alpha, found.reached) == (pytest.approx(2.1, abs=0.06), True)


@settings(max_examples=60, deadline=None)
@given(
    forgets=st.integers(1, 3000).map(lambda hundredths: hundredths / 100),
    max_alpha=st.integers(2, 4000).map(lambda hundredths: hundredths / 100),
    step=st.sampled_from([0.01, 0.05, 0.25, 1.0, 3.0]),
    kind=st.sampled_from(["target", "kodge"]),
)
def test_twelve_evaluations_are_enough_for_any_range_and_step(
    forgets: float, max_alpha: float, step: float, kind: str
) -> None:
    step = min(step, max_alpha)
    model, edit = dial()

    def metric(changed: nn.Module, data: list[str]) -> float:
        return float(data == ["retain"] or reading(changed) < forgets)

    reachable = round(step * math.floor(max_alpha / step + 1e-9), 10) >= forgets
    options: dict[str, Any] = {"metric": metric, "max_alpha": max_alpha, "step": step, "score": kind}
    if kind == "target" and not reachable:
        with pytest.warns(UnmergeWarning, match="no alpha"):
            found = search_alpha(edit, model, ["forget"], **options)
    else:
        found = search_alpha(edit, model, ["forget"], retain=["retain"], **options)
    assert len(found.curve) <= EVALUATIONS
    assert all(0 <= point.alpha <= max_alpha * (1 + 1e-9) for point in found.curve)
    assert all(point.alpha / step == pytest.approx(round(point.alpha / step), abs=1e-6) for point in found.curve)
    if kind == "target" and reachable:
        assert found.point.forget == 0


@settings(max_examples=60, deadline=None)
@given(peak=st.floats(0.0, 20.0), max_alpha=st.sampled_from([1.0, 5.0, 10.0, 20.0]))
def test_a_score_with_one_peak_is_found_wherever_the_peak_is(peak: float, max_alpha: float) -> None:
    model, edit = dial()
    peak = min(peak, max_alpha)

    def metric(changed: nn.Module, data: list[str]) -> float:
        return 1.0 if data == ["retain"] else abs(reading(changed) - peak) / 20

    found = search_alpha(edit, model, ["forget"], retain=["retain"], metric=metric, score="kodge", max_alpha=max_alpha)
    assert abs(found.alpha - peak) <= 0.06 * max_alpha
    assert len(found.curve) <= EVALUATIONS


def test_of_equal_scores_the_weakest_edit_is_taken() -> None:
    model, edit = dial()

    def metric(changed: nn.Module, data: list[str]) -> float:
        return 1.0 if data == ["retain"] else float(reading(changed) < 2.9)

    found = search_alpha(edit, model, ["forget"], retain=["retain"], metric=metric, score="kodge")
    reached = [point.alpha for point in found.curve if point.forget == 0]
    assert found.alpha == min(reached) < 4


# The model is left alone


def test_a_metric_that_fails_leaves_the_model_without_the_edit(model: nn.Module, edits: dict[str, Edit]) -> None:
    before = bits(model)
    calls: list[int] = []

    def failing(changed: nn.Module, data: Any) -> float:
        calls.append(1)
        if len(calls) == 3:
            assert not same_bits(changed, before)
            raise KeyError("disk gone")
        return 1.0

    with pytest.raises(KeyError, match="disk gone"):
        search_alpha(edits["lda"], model, FORGET.loader(), metric=failing)
    assert same_bits(model, before)
    assert not ledger_of(model).entries


@pytest.mark.parametrize("of", ["forget", "retain"])
def test_a_metric_that_is_no_number_is_told_with_its_alpha(model: nn.Module, edits: dict[str, Edit], of: str) -> None:
    before = bits(model)

    def metric(changed: nn.Module, data: str) -> float:
        return math.nan if data == of and not same_bits(changed, before) else 1.0

    with pytest.raises(DataError, match=r"gave nan at alpha 1, .* smaller max_alpha"):
        search_alpha(edits["lda"], model, ["forget"], retain=["retain"], metric=lambda m, d: metric(m, d[0]))
    assert same_bits(model, before)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_reference_without_finite_outputs_is_told(value: float, model: nn.Module, edits: dict[str, Edit]) -> None:
    reference, before = copy.deepcopy(model), bits(model)
    with torch.no_grad():
        reference[-1].bias[0] = value
    with pytest.raises(DataError, match=r"score='kl' is (nan|-inf) at alpha 0.* reference="):
        search_alpha(edits["lda"], model, FORGET.loader(), score="kl", reference=reference)
    assert same_bits(model, before)


def test_flags_and_random_state_are_as_before(model: nn.Module, edits: dict[str, Edit]) -> None:
    model = copy.deepcopy(model).train()
    model[1].eval()
    flags = [module.training for module in model.modules()]
    random, before = torch.get_rng_state(), bits(model)
    found = search_alpha(edits["lda"], model, FORGET.loader(), retain=RETAIN.loader())
    assert [module.training for module in model.modules()] == flags
    assert torch.get_rng_state().equal(random)
    assert same_bits(model, before)
    assert found.alpha == search_alpha(edits["lda"], model.eval(), FORGET.loader()).alpha, "measured in eval mode"


# What it looks like


def test_the_search_is_a_number_a_table_and_plain_values(model: nn.Module, edits: dict[str, Edit]) -> None:
    found = search_alpha(edits["lda"], model, FORGET.loader(), retain=RETAIN.loader())
    assert float(found) == found.alpha
    assert found.point in found.curve
    assert found.curve[0] == Point(0.0, found.curve[0].forget, found.curve[0].retain)
    sentence, table = str(found).split("\n\n")
    assert sentence.startswith(f"alpha {found.alpha:g} (forget {found.point.forget:.4f}, retain ")
    assert sentence.endswith("decided by target.")
    marked = [line for line in table.splitlines() if line.startswith(f"{found.alpha:g} *")]
    assert len(marked) == 1
    assert table.count("*") == 1
    assert len(table.splitlines()) == 1 + len(found.curve)
    assert found._repr_html_().count("<tr>") == 1 + len(found.curve)
    assert sentence in found._repr_html_()
    values = found.to_dict()
    assert (values["alpha"], values["stopped_by"]) == (found.alpha, "target")
    assert [Point(**point) for point in values["curve"]] == found.curve


# Wrong input


def pairs() -> list[Any]:
    return [(FORGET.images, FORGET.labels)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, r"target=0\.0 is not a share between 0 and 1, for example 0\.01"),
        ({"target": 1.0}, r"target=1\.0"),
        ({"target": -0.2}, r"target=-0\.2"),
        ({"target": 5}, r"target=5"),
        ({"target": math.nan}, r"target=nan"),
        ({"target": "a"}, r"target='a' is not a share"),
        ({"target": None}, r"target=None is not a share"),
        ({"target": True}, r"target=True is not a share"),
        ({"max_drop": "a"}, r"max_drop='a' is not a share"),
        ({"max_drop": None}, r"max_drop=None is not a share"),
        ({"step": None}, r"step=None and max_alpha=10\.0: expected numbers"),
        ({"step": "a"}, r"step='a' and max_alpha=10\.0: expected numbers"),
        ({"max_alpha": None}, r"max_alpha=None: expected numbers"),
        ({"max_alpha": "a"}, r"max_alpha='a': expected numbers"),
        ({"max_drop": -0.1}, r"max_drop=-0\.1 is not a share"),
        ({"max_drop": 2}, r"max_drop=2"),
        ({"step": 0}, r"step=0 and max_alpha=10\.0: expected numbers with 0 < step <= max_alpha"),
        ({"step": 3.0, "max_alpha": 2.0}, r"step=3\.0 and max_alpha=2\.0"),
        ({"max_alpha": math.inf}, r"max_alpha=inf"),
        ({"score": "kodje"}, r"score='kodje' is unknown\. Did you mean 'kodge'\?"),
        ({"score": "accuracy"}, r"There are: 'target', 'kodge', 'tow', 'kl'"),
        ({"score": "kodge"}, r"score='kodge' needs retain="),
        ({"score": "tow", "reference": {"forget": 0.0, "retain": 1.0}}, r"score='tow' needs retain="),
        ({"score": "tow", "retain": pairs()}, r"needs reference=.*forget and retain missing"),
        ({"score": "tow", "retain": pairs(), "reference": {"forget": 0.0}}, r"; retain missing"),
        ({"score": "kl"}, r"score='kl' needs reference=, a retrained model"),
        ({"score": "kl", "reference": {"forget": 0.0, "retain": 1.0}}, r"score='kl' needs reference=, a retrained"),
    ],
)
def test_wrong_options_are_refused_by_name(
    model: nn.Module, edits: dict[str, Edit], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EditError, match=message):
        search_alpha(edits["lda"], model, pairs(), **options)


class Unusual(nn.Module):
    """The digits network with another kind of output."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, images: Tensor) -> Any:
        logits = self.inner(images)
        return {
            "mapping": {"scores": logits},
            "nothing": None,
            "map": logits[:, :, None, None],
            "one number": logits[:, 0],
            "logits": {"logits": logits},
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "returned"),
    [
        ("mapping", r"returned dict; expected logits"),
        ("nothing", r"returned NoneType; expected logits"),
        ("map", r"returned a tensor of shape \(137, 10, 1, 1\); expected logits"),
        ("one number", r"returned a tensor of shape \(137,\); expected logits"),
    ],
    ids=["mapping", "nothing", "map", "one number"],
)
def test_a_model_that_returns_no_logits_is_told_what_it_returned(
    model: nn.Module, edits: dict[str, Edit], kind: str, returned: str
) -> None:
    wrapped = Unusual(copy.deepcopy(model), "logits")
    retain = TRAIN.without(3).loader()
    edit = unmerge.fit(wrapped, FORGET.loader(), retain, init="zero", recipe=RECIPES["lda"])
    expected = search_alpha(edits["lda"], model, pairs()).alpha
    assert search_alpha(edit, wrapped, pairs()).alpha == expected
    wrapped.kind = kind
    before = bits(wrapped)
    with pytest.raises(
        DataError,
        match=rf"the model {returned} \(samples, classes\), alone or as \.logits\. Pass forward=.* or metric=",
    ):
        search_alpha(edit, wrapped, pairs())
    assert same_bits(wrapped, before)
    found = search_alpha(edit, wrapped, pairs(), forward=lambda wrapped, batch: wrapped.inner(batch[0]))
    assert found.alpha == expected


@pytest.mark.parametrize(
    "batch",
    [FORGET.images, (FORGET.images, FORGET.labels.double()), {"input": FORGET.images}],
    ids=["a tensor", "targets of a regression", "a mapping"],
)
def test_absent_labels_are_asked_for(model: nn.Module, edits: dict[str, Edit], batch: Any) -> None:
    with pytest.raises(DataError, match=r"no class labels .* Give batches as \(inputs, labels\), or pass metric="):
        search_alpha(edits["lda"], model, [batch])


def test_one_shot_iterators_and_empty_data_are_refused(model: nn.Module, edits: dict[str, Edit]) -> None:
    def once() -> Iterator[Any]:
        yield from pairs()

    before = bits(model)
    with pytest.raises(DataError, match=r"forget is a one-shot iterator .* search_alpha reads it a second time"):
        search_alpha(edits["lda"], model, once())
    with pytest.raises(DataError, match=r"retain is a one-shot iterator .* search_alpha"):
        search_alpha(edits["lda"], model, pairs(), retain=once())
    with pytest.raises(DataError, match=r"recalibrate is a one-shot iterator"):
        search_alpha(edits["lda"], model, pairs(), recalibrate=once())
    with pytest.raises(DataError, match=r"gave no batch"):
        search_alpha(edits["lda"], model, [])
    with pytest.raises(DataError, match=r"forget: expected an iterable of batches .* Statistics"):
        search_alpha(edits["lda"], model, unmerge.collect(model, pairs()))
    assert same_bits(model, before)


def test_a_model_that_carries_the_edit_is_refused(model: nn.Module, edits: dict[str, Edit]) -> None:
    model = copy.deepcopy(model)
    with (
        edits["lda"].applied(model, 1.0),
        pytest.raises(EditError, match=r"carries this edit already.*edit\.revert\(model\)"),
    ):
        search_alpha(edits["lda"], model, pairs())


def test_another_model_is_refused(edits: dict[str, Edit], retrained: nn.Module) -> None:
    before = bits(retrained)
    with pytest.raises(EditError, match="fitted on other weights of"):
        search_alpha(edits["lda"], retrained, TRAIN.only(5).loader())
    assert same_bits(retrained, before)
