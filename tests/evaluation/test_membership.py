"""The nine attacks together: signals, gaps, rates and scores by sample."""

import pytest
import torch

from unmerge.errors import DataError
from unmerge.evaluation.membership import attack, compare, example_scores, observe, readings_of
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.subject import Setting, Subject

NINE = {
    *(f"threshold {signal}" for signal in ("confidence", "entropy", "m-entropy", "correctness")),
    *(f"SVC {signal}" for signal in ("confidence", "entropy", "m-entropy", "correctness", "softmax")),
}


def part(size: int, classes: list[int], margin: float, seed: int) -> SplitOutputs:
    """Answers of six classes whose label's logit is larger by `margin`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes)[torch.randint(0, len(classes), (size,), generator=generator)]
    logits = torch.randn(size, 6, generator=generator)
    logits[torch.arange(size), labels] += margin
    return SplitOutputs(logits, labels, torch.arange(size))


def subject(forget_margin: float, name: str = "own", test_classes: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> Subject:
    splits = {
        "forget": part(60, [0, 1], forget_margin, 0),
        "retain": part(240, [2, 3, 4, 5], 6, 1),
        "test": part(120, list(test_classes), 2, 2),
    }
    return Subject(name, Outputs(splits))


def figures(row: dict) -> dict:
    return {column.label: figure for column, figure in row.items()}


def test_a_model_that_remembers_is_found_out() -> None:
    knows, forgot = (observe(subject(margin), Setting()) for margin in (6.0, -6.0))
    assert set(knows.guesses) == NINE
    for name in NINE - {"SVC softmax"}:  # the softmax tells the class, and only test has the forgotten ones
        assert knows.guesses[name].true_negative_rate <= forgot.guesses[name].true_negative_rate, name
    assert forgot.guesses["threshold confidence"].true_negative_rate == 1
    assert knows.guesses["threshold confidence"].true_negative_rate < 0.5


def test_tables() -> None:
    own, retrained = subject(6.0), subject(-2.0, "retrained")
    setting = Setting(draws=200)
    seen, reference = observe(own, setting), observe(retrained, setting)
    found = compare(seen, reference, setting)
    scores, gaps = figures(found.rows["membership"]), figures(found.rows["membership gaps"])
    differences = [scores[name].value - reference.guesses[name].score for name in sorted(NINE)]
    assert gaps["signed gap"].value == pytest.approx(sum(differences) / 9)
    assert gaps["mean |gap|"].value == pytest.approx(sum(map(abs, differences)) / 9)
    assert scores["mean"].value == pytest.approx(sum(scores[name].value for name in NINE) / 9)
    for title, rate in (
        ("true positives on retain", "true_positive_rate"),
        ("true negatives on forget", "true_negative_rate"),
    ):
        row = figures(found.rows[f"membership, {title}"])
        assert {name: row[name].value for name in row} == {name: getattr(seen.guesses[name], rate) for name in NINE}
    assert all(figure.low <= figure.value + 0.05 and figure.value - 0.05 <= figure.high for figure in scores.values())
    assert set(found.examples) == {"log-odds", "−entropy", "−m-entropy"}
    assert all(len(values) == 60 for values in found.examples.values())
    itself = figures(compare(reference, reference, setting).rows["membership gaps"])
    assert all((figure.low, figure.value, figure.high) == (0, 0, 0) for figure in itself.values())


def test_without_reference() -> None:
    own = subject(1.0)
    found = compare(observe(own, Setting()), None, Setting())
    assert "membership gaps" not in found.rows
    assert "reference" in found.missing["gaps"]


def test_samples_are_ranked_against_unseen_ones_of_their_classes() -> None:
    own = subject(6.0)
    row = figures(compare(observe(own, Setting()), None, Setting()).rows["membership by sample"])
    assert row["AUC log-odds"].value > 0.95  # margin 6 on forget, 2 on test
    same = subject(2.0)
    row = figures(compare(observe(same, Setting()), None, Setting()).rows["membership by sample"])
    assert 0.35 < row["AUC log-odds"].value < 0.65
    without = subject(6.0, test_classes=(2, 3))
    assert "test split has none" in str(compare(observe(without, Setting()), None, Setting()).missing)


def test_seeds_and_limits() -> None:
    own = subject(1.0).outputs
    parts = (own["retain"], own["test"], own["forget"])
    first, again, other = (attack(*parts, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name].members, again[name].members) for name in NINE)
    assert any(not torch.equal(first[name].members, other[name].members) for name in NINE)
    small = attack(*parts, max_samples=30)
    assert {len(small[name].others) for name in NINE} == {30, 60}
    assert len(attack(*parts, held_out=17)["SVC entropy"].members) == 17
    with pytest.raises(DataError, match="held_out=240 of 240"):
        attack(*parts, held_out=240)
    with pytest.raises(DataError, match="'corrected' or 'reference'"):
        attack(*parts, mode="public")  # type: ignore[arg-type]


def test_reference_mode_has_the_three_defects() -> None:
    splits = {
        name: part(80, classes, 3, seed)
        for seed, (name, classes) in enumerate(
            {"forget": [0, 1], "retain": [2, 3, 4, 5], "test": [0, 1, 2, 3, 4, 5]}.items()
        )
    }
    found = attack(splits["retain"], splits["test"], splits["forget"], mode="reference")
    # Forgotten classes keep the threshold 0: confidence is never below it, minus the entropy always.
    assert found["threshold confidence"].true_negative_rate == 0
    assert found["threshold entropy"].true_negative_rate == 1
    corrected = attack(splits["retain"], splits["test"], splits["forget"])
    assert 0 < corrected["threshold entropy"].true_negative_rate < 1
    # The support vector machine reads another modified entropy.
    forget = splits["forget"]
    public, right = (readings_of(forget.logits, forget.labels, mode) for mode in ("reference", "corrected"))  # type: ignore[arg-type]
    assert torch.allclose(public["m-entropy"].double(), right["m-entropy"], atol=1e-5)
    assert not torch.allclose(public["svc m-entropy"].double(), right["svc m-entropy"], atol=0.1)
    # Classes from 10 on are not looked at.
    wide = {
        name: SplitOutputs(torch.cat([torch.full((80, 10), -9.0), s.logits], 1), s.labels + 10, s.keys)
        for name, s in splits.items()
    }
    beyond = attack(wide["retain"], wide["test"], wide["forget"], mode="reference")
    assert beyond["threshold entropy"].score == 0


def test_removed_classes_have_finite_scores() -> None:
    logits = torch.tensor([[-1e4, 2.0, 1.0], [-torch.inf, 2.0, 1.0]])
    for values in (example_scores(logits, torch.tensor([0, 0])), readings_of(logits, torch.tensor([0, 0]))):
        assert all(value.isfinite().all() for value in values.values())
