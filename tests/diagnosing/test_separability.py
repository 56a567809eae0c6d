"""S = fvar · (1 − overlap) equals what all rows of a layer give, and so does that of a random control."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import networks
import reference
import unmerge
from networks import Batch, batched, request
from unmerge import Recipe, Statistics
from unmerge.data.chosen import ChosenSamples
from unmerge.diagnosing.separability import (
    Separability,
    check_control,
    control_separability,
    mean_separability,
    mean_shift,
    random_control,
    rank_for,
    separability,
)
from unmerge.errors import StatisticsError
from unmerge.requests.gathering import pair_of
from unmerge.requests.request import Request
from unmerge.solving.pooling import pools_of

OPTIONS = {"mask": None, "forward": None, "seed": 0}

# The model, the shape of its inputs, and a layer of each kind.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: networks.mlp((20, 30, 4)), (20,), "2"),
    "convolution": (lambda: networks.convolution_net("plain"), (4, 6, 7), "conv"),
    "groups": (lambda: networks.convolution_net("groups"), (4, 6, 7), "conv"),
    "depthwise": (lambda: networks.convolution_net("depthwise"), (4, 6, 7), "conv"),
    "conv1d": (lambda: networks.conv1d_net(12, 5, 4), (12,), "0"),
}


def collected(model: nn.Module, forget: Batch, retain: Batch, size: int = 7) -> Request:
    lost, kept = (unmerge.collect(model, batched(part, size)) for part in (forget, retain))
    return pair_of(model, lost, kept, Recipe(basis="pca"))


def direct(forget: Tensor, retain: Tensor, rank: int) -> tuple[float, float]:
    """fvar and the mean overlap of two sets of rows, from their singular vectors."""
    lost, kept = (reference.pca_basis(rows, rank) for rows in (forget, retain))
    centred = forget - forget.mean(0)
    captured = (centred @ lost).square().sum() / centred.square().sum()
    overlaps = [(kept.T @ direction).norm() for direction in lost.T]
    return captured.item(), torch.stack(overlaps).mean().item()


@pytest.mark.parametrize(("features", "rank"), [(1, 1), (3, 1), (8, 2), (40, 10), (64, 16), (65, 16), (2048, 16)])
def test_the_rank_is_16_but_at_most_a_quarter_of_a_narrow_input(features: int, rank: int) -> None:
    assert rank_for(features) == rank


@pytest.mark.parametrize("kind", KINDS)
def test_captured_variance_overlap_and_shift_are_those_of_all_rows(kind: str) -> None:
    build, shape, layer = KINDS[kind]
    model = build()
    forget, retain = request(shape, forgotten=(0,), kept=(1, 2, 3), each=12)
    lost, kept = (reference.layer_inputs(model, [layer], *part)[layer].groups for part in (forget, retain))
    expected = [direct(*rows, rank_for(rows[0].shape[1])) for rows in zip(lost, kept, strict=True)]
    shifts = [
        ((f.mean(0) - r.mean(0)).norm() ** 2 / (r - r.mean(0)).square().sum(1).mean()).item()
        for f, r in zip(lost, kept, strict=True)
    ]
    pools = pools_of(collected(model, forget, retain), layer)
    found = separability(pools)
    captured, overlap = (sum(values) / len(expected) for values in zip(*expected, strict=True))
    assert found.captured == pytest.approx(captured, rel=1e-7)
    assert found.overlap == pytest.approx(overlap, rel=1e-7)
    assert found.score == pytest.approx(captured * (1 - overlap), rel=1e-7)
    assert mean_shift(pools) == pytest.approx(sum(shifts) / len(shifts), rel=1e-7)


def test_a_subspace_of_its_own_is_separable_and_a_shared_one_is_not() -> None:
    model = nn.Sequential(nn.Linear(16, 3)).double()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 16, generator=generator, dtype=torch.float64)
    first, last = noise * (torch.arange(16) < 4), noise * (torch.arange(16) >= 12)
    labels = torch.zeros(200, dtype=torch.int64)
    own = collected(model, (last[:200], labels), (first[200:], labels), 100)
    assert separability(pools_of(own, "0")).score == pytest.approx(1, abs=1e-9)
    shared = collected(model, (first[:200], labels), (first[200:], labels), 100)
    assert separability(pools_of(shared, "0")).score == pytest.approx(0, abs=1e-9)


def test_forget_inputs_that_do_not_vary_have_nothing_of_their_own() -> None:
    model = networks.mlp((8, 3))
    _, retain = request((8,))
    constant = (torch.ones(5, 8, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
    found = separability(pools_of(collected(model, constant, retain), "0"))
    assert (found.captured, found.overlap, found.score) == (0, 1, 0)


def test_the_score_over_layers_is_the_mean_of_theirs() -> None:
    layers = [Separability(0.5, 0.2), Separability(1.0, 0.9), Separability(0.3, 0.0)]
    assert mean_separability(layers) == pytest.approx((0.4 + 0.1 + 0.3) / 3)


# The random control


@pytest.mark.parametrize("subtracted", [False, True])
@pytest.mark.parametrize("kind", ["linear", "groups"])
def test_a_control_stands_in_the_place_of_the_forget_set(kind: str, subtracted: bool) -> None:
    build, shape, layer = KINDS[kind]
    model = build()
    forget, retain = request(shape, forgotten=(0,), kept=(1, 2, 3), each=12)
    asked = collected(model, forget, retain)
    if subtracted:  # the statistics of everything are at hand
        assert asked.forget is not None
        everything = unmerge.collect(model, [forget, retain])
        asked = pair_of(model, asked.forget, everything - asked.forget, Recipe(basis="pca"))
    chosen, others = (torch.arange(len(retain[0])) % 3 == 1), (torch.arange(len(retain[0])) % 3 != 1)
    control = unmerge.collect(model, [(retain[0][chosen], retain[1][chosen])])
    check_control(asked, control)
    rest = torch.cat([forget[0], retain[0][others]]), torch.cat([forget[1], retain[1][others]])
    drawn = retain[0][chosen], retain[1][chosen]
    lost, kept = (reference.layer_inputs(model, [layer], *part)[layer].groups for part in (drawn, rest))
    expected = [direct(*rows, rank_for(rows[0].shape[1])) for rows in zip(lost, kept, strict=True)]
    captured, overlap = (sum(values) / len(expected) for values in zip(*expected, strict=True))
    measured = control_separability(asked, control, layer)
    assert measured.captured == pytest.approx(captured, rel=1e-6)
    assert measured.overlap == pytest.approx(overlap, rel=1e-6)


@pytest.mark.parametrize(("decay", "within"), [(1.0, 3e-4), (0.3, 3e-4), (0.0, 3e-3)])
def test_iterated_directions_of_wide_inputs_give_the_same_numbers_as_all_rows(decay: float, within: float) -> None:
    """However flat the spectrum is: 0.0 is noise, of which no direction is more than another."""
    features, generator = 1100, torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 2))
    spread = (1 + torch.arange(features)) ** (-decay / 2)
    forget, retain = (torch.randn(count, features, generator=generator) * spread for count in (900, 2700))
    forget = forget.roll(5, 1) + 0.1 * spread
    labels = torch.zeros(2700, dtype=torch.int64)
    asked = collected(model, (forget, labels[:900]), (retain, labels), 900)
    control = unmerge.collect(model, [retain[:900]])
    found, random = separability(pools_of(asked, "0")), control_separability(asked, control, "0")
    rest = torch.cat([forget, retain[900:]])
    for measured, rows in ((found, (forget, retain)), (random, (retain[:900], rest))):
        captured, overlap = direct(rows[0].double(), rows[1].double(), 16)
        assert measured.captured == pytest.approx(captured, rel=within)
        assert measured.score == pytest.approx(captured * (1 - overlap), rel=within)


def test_a_control_may_be_labelled_when_only_one_part_of_the_request_is() -> None:
    model = networks.mlp((8, 3))
    forget, retain = request((8,), each=6)
    lost, kept = unmerge.collect(model, [forget[0]]), unmerge.collect(model, [retain])
    control = unmerge.collect(model, [(retain[0][:6], retain[1][:6])])
    asked = pair_of(model, lost, kept, Recipe(basis="pca"))
    check_control(asked, control)
    found = control_separability(asked, control, "0")
    assert found == control_separability(asked, control.without_classes(), "0")
    sketched = control_separability(asked, control.sketched({"0": 7}), "0")
    assert sketched.score == pytest.approx(found.score, rel=1e-6)


@pytest.mark.parametrize(("asked", "left", "drawn"), [(9, 15, 9), (20, 15, 14)])
def test_as_many_retain_samples_are_drawn_as_are_forgotten(asked: int, left: int, drawn: int) -> None:
    model = networks.mlp((8, 3))
    inputs = torch.randn(asked + left, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen: list[Tensor] = []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        return model(batch)

    retain = list(inputs[asked:].split(4))
    lost, kept = unmerge.collect(model, [inputs[:asked]]), unmerge.collect(model, retain)
    request = pair_of(model, lost, kept, Recipe(basis="pca"))
    draws = {}
    for seed in (0, 0, 1):
        seen.clear()
        found = random_control(model, retain, request, OPTIONS | {"forward": forward, "seed": seed})
        assert found.statistics.samples == drawn
        assert not found.shifts
        rows = {tuple(row) for row in torch.cat(seen).tolist()}
        assert len(rows) == drawn, "no sample is drawn twice"
        assert rows <= {tuple(row) for row in inputs[asked:].tolist()}, "from retain alone"
        torch.testing.assert_close(
            found.statistics["0"].moments.mean, torch.tensor(sorted(rows), dtype=torch.float64).mean(0)
        )
        assert draws.setdefault(seed, rows) == rows, "the same seed draws the same samples"
    assert draws[0] != draws[1]


def texts(count: int, seed: int, topic: float = 1.0) -> list[dict[str, Tensor]]:
    """Sequences of different length, the tokens of each about a point of its own: no independent draws."""
    generator = torch.Generator().manual_seed(seed)
    points = topic * torch.randn(count, 1, 8, generator=generator, dtype=torch.float64)
    tokens = points + torch.randn(count, 12, 8, generator=generator, dtype=torch.float64)
    lengths = torch.randint(4, 13, (count, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    return [{"input": part, "attention_mask": seen} for part, seen in zip(tokens.split(9), mask.split(9), strict=True)]


def of_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input"])


def test_the_shift_to_expect_follows_from_the_means_of_random_groups() -> None:
    model, retain = networks.mlp((8, 3)), texts(60, seed=1)
    options = OPTIONS | {"forward": of_tokens}
    lost, kept = (unmerge.collect(model, data, forward=of_tokens) for data in (texts(36, seed=0), retain))
    control = random_control(model, retain, pair_of(model, lost, kept, Recipe(basis="pca")), options)
    assert control.statistics.classes == ()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:36].tolist()
    rows = [batch["input"][i][batch["attention_mask"][i] > 0] for batch in retain for i in range(len(batch["input"]))]
    groups = [torch.cat([rows[place] for place in order[number::16]]) for number in range(16)]
    drawn = torch.cat(groups)
    apart = sum((group - drawn.mean(0)).sum(0).square().sum() for group in groups)
    variance = torch.cat(rows).var(0, correction=0).sum()
    assert control.shifts == {"0": pytest.approx((16 / 15 * apart / len(drawn) ** 2 / variance).item())}


@pytest.mark.parametrize("topic", [0.0, 0.3, 2.0])
def test_the_shift_to_expect_is_that_of_random_draws_however_alike_the_tokens_of_a_text_are(topic: float) -> None:
    model, data = networks.mlp((8, 3)), texts(900, seed=2, topic=topic)
    whole = unmerge.collect(model, data, forward=of_tokens)
    shifts, expected = [], []
    for seed in range(25):
        places = torch.randperm(900, generator=torch.Generator().manual_seed(100 + seed))[:40].tolist()
        part = unmerge.collect(model, ChosenSamples(data, places), forward=of_tokens)
        asked = pair_of(model, part, whole - part, Recipe(basis="pca"))
        shifts.append(mean_shift(pools_of(asked, "0")))
        rest = ChosenSamples(data, sorted(set(range(900)) - set(places)))
        options = OPTIONS | {"forward": of_tokens, "seed": seed}
        expected.append(random_control(model, rest, asked, options).shifts["0"])
    # Both are means of 25 draws in eight dimensions.
    assert sum(shifts) == pytest.approx(sum(expected), rel=0.35)
    if topic == 2.0:
        assert sum(expected) * 40 / 25 > 0.6, "nearly as far off as if each text were one row"
    if topic == 0.0:
        assert sum(expected) * 40 / 25 < 0.2, "far less: a text has eight rows"


def wrong(change: str) -> tuple[Request, Statistics]:
    """A request, and a control that does not belong to it."""
    model = networks.mlp((8, 6, 3))
    forget, retain = request((8,), each=6)
    asked = collected(model, forget, retain)
    few = retain[0][: 5 if change == "size" else 6]
    if change == "samples":
        few = 20 * few
    if change == "weights":
        with torch.no_grad():
            model[2].bias += 1
    return asked, unmerge.collect(model, [few], layers=["0"] if change == "layers" else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("size", r"control has 5 samples; expected 6, as many as are to be forgotten"),
        ("layers", r"different layers: 2 "),
        ("weights", r"different weights: '2\.bias'"),
        ("samples", r"not among those of the request: inputs of '0' vary more"),
    ],
)
def test_a_control_that_does_not_belong_is_refused(change: str, message: str) -> None:
    with pytest.raises(StatisticsError, match=message):
        check_control(*wrong(change))
