"""The verdict: class requests on real digits are separable, random instances are not, and fit heeds it."""

from __future__ import annotations

import re
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import unmerge
from mixtures import WordMixture, texts
from unmerge import Edit, Recipe, Statistics
from unmerge.bench.digits import Split, load_digits, train
from unmerge.diagnosing.separability import Separability
from unmerge.diagnosing.verdict import SMALL_SCORE, Evidence, Verdict, verdict_of
from unmerge.errors import DataError, LayerError, RecipeError, StatisticsError, UnmergeWarning
from unmerge.requests.gathering import pair_of

TRAIN, _ = load_digits()
HEAD_ONLY = Recipe(layers=["11"], head="edit")  # the classifier alone: quick to fit
NUMBERS = r"\(S = 0\.\d{3}, \d\.\d times a random subset's 0\.\d{3}; mean shift [\d.e+-]+ times a random draw's\)"


def taken(places: Tensor) -> tuple[Split, Split]:
    """The samples at some places, and the others."""
    chosen = torch.zeros(len(TRAIN.labels), dtype=torch.bool)
    chosen[places] = True
    lost, kept = (Split(TRAIN.images[part], TRAIN.labels[part]) for part in (chosen, ~chosen))
    return lost, kept


def of_classes(*classes: int) -> tuple[Split, Split]:
    return TRAIN.only(*classes), TRAIN.without(*classes)


def at_random(size: int, seed: int = 0) -> tuple[Split, Split]:
    return taken(torch.randperm(len(TRAIN.labels), generator=torch.Generator().manual_seed(seed))[:size])


def half_of(digit: int) -> tuple[Split, Split]:
    places = (TRAIN.labels == digit).nonzero()[:, 0]
    return taken(places[: len(places) // 2])


CLASSES = {"0": of_classes(0), "3": of_classes(3), "3 and 5": of_classes(3, 5)}
RANDOM = {f"{size} at random": at_random(size) for size in (50, 100, 300)}
HALVES = {"half of 8": half_of(8), "half of 3": half_of(3)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return train(TRAIN, epochs=6)


@pytest.fixture(scope="module")
def everything(model: nn.Module) -> Statistics:
    """The statistics of all training digits in the layers that a default recipe edits."""
    return unmerge.collect(model, TRAIN.loader(), ["6", "11"])


@pytest.fixture(scope="module")
def verdicts(model: nn.Module, everything: Statistics) -> dict[tuple[str, bool], Verdict]:
    """On every request, with a random control and without."""
    found = {}
    for name, (forget, retain) in (CLASSES | RANDOM | HALVES).items():
        lost = unmerge.collect(model, forget.loader(), everything)
        drawn = torch.randperm(len(retain.labels), generator=torch.Generator().manual_seed(7))[: lost.samples]
        control = unmerge.collect(model, [retain.images[drawn]], everything)
        kept = everything - lost
        found[name, True] = unmerge.diagnose(lost, kept, model, recipe=Recipe(basis="lda"), control=control).verdict
        # As fit does; retain statistics have no samples to draw a control from.
        request = pair_of(model, lost, kept, Recipe(basis="lda"))
        found[name, False] = Evidence().add(model, request, everything.layers, kept, seed=0).verdict()
    return found


@pytest.mark.parametrize("controlled", [True, False])
@pytest.mark.parametrize("name", [*CLASSES, *RANDOM, *HALVES])
def test_digits_are_separable_and_random_instances_are_not(
    verdicts: dict[tuple[str, bool], Verdict], name: str, controlled: bool
) -> None:
    assert verdicts[name, controlled].kind == ("instance-like" if name in RANDOM else "separable")


def test_the_ratio_of_classes_is_well_above_that_of_random_instances(
    verdicts: dict[tuple[str, bool], Verdict],
) -> None:
    of_class, of_random = ([verdicts[name, True].ratio for name in names] for names in (CLASSES, RANDOM))
    assert all(ratio is not None for ratio in of_class + of_random)
    assert min(of_class) > 2.4  # the paper's
    assert max(of_random) < 1.6
    for name in (*CLASSES, *RANDOM):
        calibrated, plain = verdicts[name, True], verdicts[name, False]
        assert calibrated.ratio == pytest.approx(calibrated.separability / calibrated.control)
        assert (plain.control, plain.ratio) == (None, None)
        assert plain.separability == pytest.approx(calibrated.separability)
        assert plain.shift == pytest.approx(calibrated.shift)


def test_the_mean_of_a_random_draw_is_off_by_about_what_chance_makes_it(
    verdicts: dict[tuple[str, bool], Verdict],
) -> None:
    assert all(0.1 < verdicts[name, True].shift < 4 for name in RANDOM)
    assert all(verdicts[name, True].shift > 30 for name in (*CLASSES, *HALVES))


def test_data_gets_its_control_drawn_and_the_same_verdict_as_statistics(model: nn.Module) -> None:
    forget, retain = RANDOM["100 at random"]
    found = unmerge.diagnose(forget.loader(), retain.loader(), model, recipe=Recipe(basis="lda", layers=["6", "11"]))
    assert found.verdict.kind == "instance-like"
    assert found.verdict.ratio is not None
    assert 0.5 < found.verdict.ratio < 1.6


@pytest.mark.parametrize("seed", [2, 19, 30])  # whose draws have 2.4 to 4.9 times the S of their control
def test_a_random_draw_is_none_the_less_so_in_a_vision_transformer_whose_s_is_small(seed: int) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    config = ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    model = ViTForImageClassification(config).eval()
    forget, retain = at_random({2: 100, 19: 300, 30: 100}[seed], seed)
    recipe = Recipe(basis="lda", seed=seed)
    found = unmerge.diagnose(forget.loader(), retain.loader(), model, recipe=recipe).verdict
    assert found.separability < SMALL_SCORE
    assert found.kind == "instance-like"


# The numbers that decide


@pytest.mark.parametrize(
    ("captured", "control", "shift", "kind"),
    [
        (0.4, 0.1, 1.0, "separable"),
        (0.4, 0.1, 0.0, "separable"),  # directions of its own without another mean
        (0.4, 0.25, 1.0, "separable"),
        (0.4, 0.25, 0.01, "instance-like"),
        (0.4, 0.4, 0.01, "instance-like"),
        (0.4, 0.4, 1.0, "entangled"),
        (0.4, None, 1.0, "separable"),
        (0.4, None, 0.01, "instance-like"),
        (0.015, None, 1.0, "entangled"),
        (0.015, 0.001, 0.01, "instance-like"),  # neither another mean nor anything to speak of outside the rest
        (0.015, 0.001, 1.0, "entangled"),
        (0.4, 0.0, 1.0, "separable"),
    ],
)
def test_the_verdict_follows_from_score_ratio_and_shift(
    captured: float, control: float | None, shift: float, kind: str
) -> None:
    layers = {"a": Separability(captured, 0.0), "b": Separability(1.0, 1 - captured)}
    others = None if control is None else {"a": Separability(control, 0.0), "b": Separability(0.5, 1 - 2 * control)}
    found = verdict_of(layers, others, {"a": shift / 2, "b": shift}, samples=100)
    assert found.kind == kind
    assert found.separability == pytest.approx(captured)
    assert found.shift == pytest.approx(100 * shift), "the layer that shows most"
    assert found.control == (None if control is None else pytest.approx(control))


def test_a_verdict_prints_its_numbers_and_its_sentence() -> None:
    layer = {"a": Separability(0.4, 0.5)}
    found = verdict_of(layer, {"a": Separability(0.1, 0.5)}, {"a": 0.25}, samples=50)
    first, sentence = str(found).split("\n")
    assert first == "separable (S = 0.200, 4.0 times a random subset's 0.050; mean shift 12.5 times a random draw's)."
    assert sentence == found.sentence
    assert "directions of its own" in sentence
    assert "not calibrated: pass control=" in str(verdict_of(layer, None, {"a": 0.25}, samples=50))


def test_layers_that_the_control_has_not_reached_are_not_compared() -> None:
    layers = {"a": Separability(0.4, 0.0), "b": Separability(0.9, 0.0)}
    found = verdict_of(layers, {"a": Separability(0.1, 0.0)}, {"a": 0.0, "b": 0.5}, samples=100)
    assert (found.separability, found.control) == (pytest.approx(0.4), pytest.approx(0.1))
    assert found.ratio == pytest.approx(4)
    assert found.shift == pytest.approx(50), "needs no control"
    assert verdict_of(layers, {}, {"a": 0.5}, samples=100).ratio is None


def test_shifts_are_in_units_of_what_a_random_draw_shows_where_that_is_known() -> None:
    layers = dict.fromkeys("ab", Separability(0.4, 0.0))
    found = verdict_of(layers, layers, {"a": 0.02, "b": 0.03}, samples=100, expected={"a": 0.002})
    assert found.shift == pytest.approx(10)
    assert found.kind == "entangled"


# Of a text all tokens are alike, so that their number says little of what a random draw shows

AUTHORS, EACH, LENGTH, FEATURES = 12, 20, 30, 24


def authors() -> Tensor:
    """Texts as (author, text, token, feature): an author's are a little alike, the tokens of a text more."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(AUTHORS, 1, 1): 0.25, (AUTHORS, EACH, 1): 0.3, (AUTHORS, EACH, LENGTH): 1.0}
    return sum(size * torch.randn(*shape, FEATURES, generator=generator) for shape, size in shapes.items())


@pytest.mark.parametrize("seed", range(4))
def test_an_author_is_no_random_draw_of_texts_and_random_texts_are(seed: int) -> None:
    everything = authors().flatten(0, 1)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    of_author = torch.arange(len(everything)).roll(-EACH * seed)

    def judged(places: Tensor) -> Verdict:
        parts = places[:EACH], places[EACH:]
        data = ([{"input": batch} for batch in everything[part].split(16)] for part in parts)
        recipe = Recipe(basis="contrastive", rank=4, retain_rank=4, layers=["0"])
        return unmerge.diagnose(*data, networks.mlp((FEATURES, 3), torch.float32), recipe=recipe).verdict

    of_one, random = judged(of_author), judged(order)
    assert random.kind == "instance-like"
    assert 0.4 < random.shift < 2.5
    assert of_one.kind in ("entangled", "separable")
    assert of_one.shift > 5


EXPERT_0 = ["routing.experts.0.up", "routing.experts.0.down"]


def with_a_rare_expert() -> tuple[nn.Module, list[Any], list[Any]]:
    """A mixture, and data in which expert 0 is common in forget and in one retain sample alone."""
    forget, retain = texts([0, 1], 2), texts([1, 2], 20, seed=1)
    retain[-1]["input_ids"][-1] %= 10
    return WordMixture(), forget, retain


@pytest.mark.filterwarnings("ignore:the request looks:unmerge.errors.UnmergeWarning")
def test_an_expert_that_the_control_misses_is_edited_without_it() -> None:
    model, forget, retain = with_a_rare_expert()
    recipe = Recipe(layers="re:experts", rank=2, retain_rank=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        edit = unmerge.fit(model, forget, retain, init="zero", recipe=recipe)
    assert set(EXPERT_0) < set(edit.layers)
    assert edit.provenance["verdict"]["ratio"] is not None
    assert not any("experts.0" in str(warning.message) for warning in told)
    # The same without the rare expert: it does not count.
    others = unmerge.fit(model, forget, retain, init="zero", recipe=recipe.but(layers=r"re:experts\.1"))
    found, expected = (each.provenance["verdict"] for each in (edit, others))
    assert (found["ratio"], found["separability"]) == (expected["ratio"], expected["separability"])


@pytest.mark.filterwarnings("ignore:the request looks:unmerge.errors.UnmergeWarning")
def test_a_control_that_reaches_no_layer_is_none() -> None:
    model, forget, retain = with_a_rare_expert()
    recipe = Recipe(layers=r"re:experts\.0", rank=2, retain_rank=2)
    edit = unmerge.fit(model, forget, retain, init="zero", recipe=recipe)
    assert list(edit.layers) == EXPERT_0
    assert edit.provenance["verdict"]["ratio"] is None
    diagnosis = unmerge.diagnose(forget, retain, model, recipe=recipe)
    assert diagnosis.verdict.ratio is None


@pytest.mark.filterwarnings("ignore:the request looks:unmerge.errors.UnmergeWarning")
@pytest.mark.filterwarnings("ignore:left out:unmerge.errors.UnmergeWarning")
def test_a_diagnosis_leaves_out_the_experts_that_fit_leaves_alone() -> None:
    model, forget, retain = with_a_rare_expert()
    recipe = Recipe(layers="re:experts", rank=7, retain_rank=2)
    with pytest.warns(UnmergeWarning, match="layers of experts are left alone"):
        edit = unmerge.fit(model, forget, retain, init="zero", recipe=recipe)
    with pytest.warns(UnmergeWarning, match="layers of experts are left alone"):
        diagnosis = unmerge.diagnose(forget, retain, model, recipe=recipe)
    assert list(diagnosis.layers) == list(edit.layers)
    assert not set(EXPERT_0) & set(edit.layers)


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
def test_a_control_may_know_the_experts_that_are_left_out() -> None:
    model, forget, retain = with_a_rare_expert()
    recipe = Recipe(layers="re:experts", rank=7, retain_rank=2)
    lost = unmerge.collect(model, forget, recipe.layers)
    control = unmerge.collect(model, retain[:2], lost)
    diagnosis = unmerge.diagnose(lost, unmerge.collect(model, retain, lost), model, recipe=recipe, control=control)
    assert not set(EXPERT_0) & set(diagnosis.layers)
    assert diagnosis.verdict.ratio is not None
    with pytest.raises(LayerError, match=r"no layer is left to look at: .* saw fewer than"):
        unmerge.diagnose(forget, retain, model, recipe=recipe.but(rank=1000))


# fit heeds it


def asked(model: nn.Module, parts: tuple[Split, Split], **options: Any) -> Edit:
    forget, retain = parts
    return unmerge.fit(model, forget.loader(), retain.loader(), init="zero", **({"recipe": HEAD_ONLY} | options))


def test_a_random_request_is_warned_about_and_edited_all_the_same(model: nn.Module) -> None:
    with pytest.warns(UnmergeWarning) as caught:
        edit = asked(model, RANDOM["100 at random"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert re.match(rf"the request looks instance-like {NUMBERS}\.\nThe forget samples have nothing in common", message)
    assert "unmerge.diagnose shows more; on_verdict='raise' refuses" in message
    ignored = asked(model, RANDOM["100 at random"], on_verdict="ignore")
    assert edit.layers["11"].B.equal(ignored.layers["11"].B)
    recorded = edit.provenance["verdict"]
    assert recorded["kind"] == "instance-like"
    assert recorded["sentence"] in message
    assert f"S = {recorded['separability']:.3f}" in message


def test_a_random_request_is_refused_on_demand_and_the_model_is_as_before(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DataError) as refused:
        asked(model, RANDOM["100 at random"], on_verdict="raise")
    message = str(refused.value)
    assert re.match(rf"the request looks instance-like {NUMBERS}", message)
    assert message.endswith("Pass on_verdict='ignore' to edit all the same.")
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_an_ignored_verdict_is_not_made(model: nn.Module) -> None:
    calls: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return model(batch[0])

    forget, retain = RANDOM["100 at random"]
    edit = asked(model, (forget, retain), on_verdict="ignore", forward=forward)
    assert edit.provenance["verdict"] is None
    assert "verdict" not in edit.provenance["seconds"]
    read = sum(size for size in calls if size > 2)  # a first look takes two samples
    assert read == len(forget.labels) + len(retain.labels), "no pass over a control"


def test_class_requests_get_no_verdict_whatever_is_asked(model: nn.Module, everything: Statistics) -> None:
    for on_verdict in ("warn", "raise", "ignore"):
        assert asked(model, CLASSES["3"], on_verdict=on_verdict).provenance["verdict"] is None
    edit = unmerge.fit(model, classes=[3], statistics=everything, init="zero", on_verdict="raise")
    assert edit.provenance["verdict"] is None


def test_a_separable_request_that_is_no_class_passes_with_its_verdict(model: nn.Module) -> None:
    edit = asked(model, HALVES["half of 8"], on_verdict="raise")
    assert edit.provenance["verdict"]["kind"] == "separable"
    assert edit.provenance["verdict"]["ratio"] > 1.5


def test_unlabelled_classes_are_judged_and_pass(model: nn.Module) -> None:
    forget, retain = CLASSES["0"]
    edit = unmerge.fit(
        model, [forget.images], [retain.images], init="zero", recipe=HEAD_ONLY.but(basis="lda"), on_verdict="raise"
    )
    assert edit.provenance["verdict"]["kind"] == "separable"


def test_statistics_and_one_shot_data_are_judged_without_a_control(model: nn.Module, everything: Statistics) -> None:
    forget, retain = RANDOM["300 at random"]
    lost = unmerge.collect(model, forget.loader(), everything)
    with pytest.warns(UnmergeWarning, match="not calibrated: pass control="):
        from_statistics = unmerge.fit(model, lost, everything - lost, init="zero", recipe=HEAD_ONLY)
    with pytest.warns(UnmergeWarning, match="not calibrated"):
        once = unmerge.fit(model, iter(forget.loader()), iter(retain.loader()), init="zero", recipe=HEAD_ONLY)
    for edit in (from_statistics, once):
        assert edit.provenance["verdict"]["ratio"] is None
    found, expected = (edit.provenance["verdict"]["separability"] for edit in (once, from_statistics))
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_single_retain_sample_leaves_none_for_a_control(model: nn.Module) -> None:
    forget, retain = CLASSES["0"]
    single = [retain.images[:1]]
    edit = unmerge.fit(
        model, [forget.images], single, init="zero", recipe=Recipe(basis="lda", layers=["6"], head="edit")
    )
    assert edit.provenance["verdict"]["ratio"] is None
    found = unmerge.diagnose([forget.images], single, model, recipe=Recipe(basis="lda", layers=["6"], head="edit"))
    assert found.verdict.ratio is None


def test_an_unknown_answer_to_a_verdict_is_refused(model: nn.Module) -> None:
    with pytest.raises(RecipeError, match=r"on_verdict='error' is not 'warn', 'raise' or 'ignore'"):
        asked(model, CLASSES["3"], on_verdict="error")


def test_the_control_follows_the_seed_of_the_recipe(model: nn.Module) -> None:
    half = HALVES["half of 8"]
    first, again, other = (
        asked(model, half, recipe=HEAD_ONLY.but(seed=seed)).provenance["verdict"] for seed in (0, 0, 1)
    )
    assert first == again
    assert first["control"] != other["control"]
    assert first["separability"] == other["separability"]


# What an edit records


def test_what_a_recipe_leaves_open_is_recorded_with_its_reason(model: nn.Module, everything: Statistics) -> None:
    edit = unmerge.fit(model, classes=[3, 5], statistics=everything, init="zero", recipe=Recipe(skip_layers="auto"))
    choices = edit.provenance["choices"]
    assert choices["layers"].startswith("2 layers: the last quarter and the classifier")
    assert choices["mean"].startswith("preserved in 2 of 2 layers")
    assert choices["head"].startswith("rows [3, 5] removed")
    assert choices["alpha"].startswith("1: ")
    assert choices["basis"].startswith(f"{edit.recipe.basis}: ")
    assert edit.recipe.basis != "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmergeWarning)
        choices = asked(model, RANDOM["50 at random"], recipe=Recipe(basis="pca", layers=["11"])).provenance["choices"]
    assert choices["head"] == "edited, no row removed: the request is not made of whole classes"
    assert choices["alpha"] == "open: search_alpha finds the smallest that forgets"
    assert "layers" not in choices
    assert "basis" not in choices


def test_a_recipe_that_leaves_nothing_open_records_no_choice(model: nn.Module) -> None:
    closed = Recipe(basis="lda", layers=["11"], mean="preserve", head="edit", alpha=2.0)
    assert asked(model, CLASSES["3"], recipe=closed).provenance["choices"] == {}


def test_verdict_and_choices_survive_saving(model: nn.Module, tmp_path: Path) -> None:
    edit = asked(model, HALVES["half of 8"], recipe=Recipe(basis="lda", layers=["11"]))
    edit.save(tmp_path)
    read = Edit.load(tmp_path).provenance
    assert read["verdict"] == edit.provenance["verdict"]
    assert read["verdict"].keys() == asdict(verdict_of({"a": Separability(1, 0)}, None, {"a": 1.0}, 1)).keys()
    assert read["choices"] == edit.provenance["choices"]
    assert read["choices"].keys() == {"mean", "head", "alpha"}


# Wrong input


def test_a_control_of_another_size_is_refused(model: nn.Module, everything: Statistics) -> None:
    lost = unmerge.collect(model, RANDOM["50 at random"][0].loader(), everything)
    control = unmerge.collect(model, [TRAIN.images[:60]], everything)
    with pytest.raises(StatisticsError, match="the control has 60 samples; expected 50"):
        unmerge.diagnose(lost, everything - lost, model, control=control)


def test_statistics_of_other_layers_or_weights_are_refused(model: nn.Module, everything: Statistics) -> None:
    forget = RANDOM["50 at random"][0]
    lost = unmerge.collect(model, forget.loader(), everything)
    control = unmerge.collect(model, [TRAIN.images[:50]], ["11"])
    with pytest.raises(StatisticsError, match="different layers: 6 "):
        unmerge.diagnose(lost, everything - lost, model, control=control)
    with pytest.raises(StatisticsError, match="different layers: 6 "):
        unmerge.diagnose(unmerge.collect(model, forget.loader(), ["11"]), everything, model)
    other = train(TRAIN, seed=1, epochs=1)
    with pytest.raises(StatisticsError, match=r"collected with other weights: '0\.weight' differs"):
        unmerge.diagnose(lost, everything - lost, other)
    with pytest.raises(StatisticsError, match=r"different weights: '0\.weight' differs"):
        unmerge.diagnose(lost, unmerge.collect(other, TRAIN.loader(), ["6", "11"]), model)
    strange = unmerge.collect(other, [TRAIN.images[:50]], ["6", "11"])
    with pytest.raises(StatisticsError, match=r"different weights: '0\.weight' differs"):
        unmerge.diagnose(lost, everything - lost, model, control=strange)


def test_layers_without_the_samples_in_front_keep_their_control() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x.transpose(0, 1))).mean(0))

    torch.manual_seed(0)
    model = TimeFirst()
    data = [[{"x": torch.randn(8, 5, 6) + shift} for _ in range(5)] for shift in (1.0, 0.0)]
    recipe = Recipe(layers=["first", "last"], rank=2, retain_rank=2)
    edit = unmerge.fit(model, *data, init="zero", recipe=recipe, forward=lambda model, batch: model(**batch))
    found = edit.provenance["verdict"]
    assert found["control"] is not None
    assert found["ratio"] is not None
    seen = unmerge.diagnose(*data, model, init="zero", recipe=recipe, forward=lambda model, batch: model(**batch))
    assert seen.verdict.control == pytest.approx(found["control"])


def test_layers_that_were_collected_on_purpose_are_not_called_the_last_quarter() -> None:
    model = networks.mlp((6, 8, 8, 4))
    first = next(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    generator = torch.Generator().manual_seed(0)
    sides = [
        unmerge.collect(model, [torch.randn(40, 6, generator=generator, dtype=torch.float64) + shift], [first])
        for shift in (1.0, 0.0)
    ]
    choices = unmerge.fit(model, *sides, init="zero", on_verdict="ignore").provenance["choices"]
    assert choices["layers"] == "1 layers: those collected"
    assert choices["basis"].startswith("wiener")
    assert choices["rank"].startswith("16: ")
    assert choices["lambda"].startswith("10: ")
