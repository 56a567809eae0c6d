"""The nine attacks together: signals, gaps, rates and scores by sample."""

import math

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from unmerge.errors import DataError
from unmerge.evaluation.membership import attack, attack_sets, compare, example_scores, observe, readings_of
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.subject import Setting, Subject

NINE = {
    *(f"threshold {signal}" for signal in ("confidence", "entropy", "m-entropy", "correctness")),
    *(f"SVC {signal}" for signal in ("confidence", "entropy", "m-entropy", "correctness", "softmax")),
}


def part(size: int, classes: list[int], margin: float, seed: int, width: int = 6) -> SplitOutputs:
    """Answers whose label's logit is larger by `margin`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes)[torch.randint(0, len(classes), (size,), generator=generator)]
    logits = torch.randn(size, width, generator=generator)
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


def published(sets: list[SplitOutputs]) -> dict[str, tuple[float, float]]:
    """TPR and TNR of the nine attackers sample by sample, as the public code defines them, defects included."""

    def log(value: np.float32, least: float = 1e-30) -> float:
        return math.log(value) if value > least else math.log(1e-30)

    def signals(probabilities: np.ndarray, labels: list[int]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in ("confidence", "entropy", "m-entropy", "SVC m-entropy")}
        one = np.float32(1)
        for row, label in zip(probabilities, labels, strict=True):
            found["confidence"].append(float(row[label]))
            found["entropy"].append(-sum(float(p) * log(p) for p in row))
            others = sum(float(p) * log(one - p) for place, p in enumerate(row) if place != label)
            found["m-entropy"].append(-float(one - row[label]) * log(row[label]) - others)
            swapped = [one - p if place in labels else p for place, p in enumerate(row)]  # labels of the whole set
            found["SVC m-entropy"].append(-sum(float(q) * log(p, 0) for q, p in zip(swapped, row, strict=True)))
        return found

    def cut(members: list[float], others: list[float]) -> float:
        best, at = 0.0, 0.0
        if not members or not others:  # the shares are no numbers, and no number is larger
            return at
        for value in members + others:
            share = 0.5 * (
                sum(m >= value for m in members) / len(members) + sum(o < value for o in others) / len(others)
            )
            if share > best:
                best, at = share, value
        return at

    labels = [each.labels.tolist() for each in sets]
    softmax = [each.logits.softmax(1).numpy() for each in sets]
    right = [(each.argmax(1) == np.array(known)).astype(float) for each, known in zip(softmax, labels, strict=True)]
    read = [signals(*each) for each in zip(softmax, labels, strict=True)]
    found = {"threshold correctness": (right[2].mean(), 1 - right[3].mean())}
    for name, sign in (("confidence", 1), ("entropy", -1), ("m-entropy", -1)):
        hits = [0, 0]
        for label in range(10):
            own = [
                [sign * value for value, known in zip(one[name], names, strict=True) if known == label]
                for one, names in zip(read, labels, strict=True)
            ]
            at = cut(own[0], own[1])
            hits[0] += sum(value >= at for value in own[2])
            hits[1] += sum(value < at for value in own[3])
        found[f"threshold {name}"] = (hits[0] / len(labels[2]), hits[1] / len(labels[3]))
    inputs: dict[str, list[np.ndarray]] = {"softmax": softmax, "correctness": right}
    for name, reading in (("confidence", "confidence"), ("entropy", "entropy"), ("m-entropy", "SVC m-entropy")):
        inputs[name] = [np.array(one[reading]) for one in read]
    for name, values in inputs.items():
        rows = [each.reshape(len(each), -1) for each in values]
        machine = SVC(C=3, gamma="auto", kernel="rbf")
        machine.fit(np.concatenate(rows[:2]), [1] * len(rows[0]) + [0] * len(rows[1]))
        found[f"SVC {name}"] = (machine.predict(rows[2]).mean(), 1 - machine.predict(rows[3]).mean())
    return found


@pytest.mark.parametrize("sharpness", [1, 3, 10])  # 10: most answers round to certainty in single precision
def test_reference_mode_has_the_numbers_of_the_public_code(sharpness: float) -> None:
    retained, width = list(range(2, 11)), 12  # 0, 1 and 11 are forgotten; from 10 on the public code does not look
    sets = [
        part(160, retained, 3, 0, width),
        part(120, list(range(width)), 1.5, 1, width),
        part(60, retained, 3, 2, width),
        part(50, [0, 1, 11], 2, 3, width),
    ]
    sets = [SplitOutputs(sharpness * each.logits, each.labels, each.keys) for each in sets]
    found = attack_sets(*sets, mode="reference", max_samples=None)
    expected = published(sets)
    assert set(found) == set(expected) == NINE
    for name, (positives, negatives) in expected.items():
        assert found[name].true_positive_rate == pytest.approx(positives, abs=1e-12), name
        assert found[name].true_negative_rate == pytest.approx(negatives, abs=1e-12), name


def test_removed_classes_have_finite_scores() -> None:
    logits = torch.tensor([[-1e4, 2.0, 1.0], [-torch.inf, 2.0, 1.0]])
    for values in (example_scores(logits, torch.tensor([0, 0])), readings_of(logits, torch.tensor([0, 0]))):
        assert all(value.isfinite().all() for value in values.values())
