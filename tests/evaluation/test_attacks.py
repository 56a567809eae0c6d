"""Attackers: thresholds by hand and against the literal published loops, rankings against counting."""

import numpy as np
import pytest
import torch
from torch import Tensor

from unmerge.evaluation.attacks import (
    Guesses,
    Pool,
    area_under_curve,
    rate_at_false_positives,
    svc_attack,
    threshold,
    threshold_attack,
)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_threshold_by_hand() -> None:
    # .9: (1/3 + 1)/2, .8: (2/3 + 1)/2, .4: (1 + 2/3)/2, .5: (2/3 + 2/3)/2, ...: .8 and .4 are best, .8 comes first.
    assert threshold(t(0.9, 0.8, 0.4), t(0.5, 0.3, 0.2)) == 0.8
    assert threshold(t(0.4, 0.8, 0.9), t(0.5, 0.3, 0.2)) == 0.4


def test_shares_that_single_precision_cannot_tell_apart() -> None:
    members = torch.arange(1, 7002, dtype=torch.float64)
    others = torch.arange(6997, dtype=torch.float64) * 7001 / 6997 + 0.5
    shares = {
        t: 0.5 * (int((members >= t).sum()) / 7001 + int((others < t).sum()) / 6997)
        for t in torch.cat([members, others]).tolist()
    }
    assert threshold(members, others) == max(shares, key=shares.__getitem__)  # the first of the best


def test_threshold_attack_by_hand() -> None:
    values = Pool(t(0.9, 0.8, 0.3), t(0.7, 0.2, 0.1, 0.6), t(0.85, 0.75, 0.25), t(0.95, 0.65, 0.1, 0.65))
    labels = Pool(*(torch.tensor(x) for x in ([0, 0, 1], [0, 1, 1, 2], [0, 0, 1], [0, 0, 1, 2])))
    # Class 0 cuts at .8, class 1 at .3; class 2 has no members and takes the cut of all, .8.
    found = threshold_attack(values, labels)
    assert found.members.tolist() == [True, False, False]
    assert found.others.tolist() == [False, True, True, True]
    assert (found.true_positive_rate, found.true_negative_rate) == (pytest.approx(1 / 3), 0.75)
    assert found.score == pytest.approx((1 / 3 + 0.75) / 2)
    # The public code leaves class 2 at 0, where a confidence never is below.
    assert threshold_attack(values, labels, "reference").others.tolist() == [False, True, True, False]


def published(values: Pool, labels: Pool, classes: int = 10) -> float:
    """The public threshold attack, literally."""

    def setting(members: np.ndarray, others: np.ndarray) -> float:
        cut, best = 0.0, 0.0
        for value in np.concatenate((members, others)):
            with np.errstate(invalid="ignore", divide="ignore"):
                share = np.float64(0.5) * (
                    np.sum(members >= value) / np.float64(len(members))
                    + np.sum(others < value) / np.float64(len(others))
                )
            if share > best:
                cut, best = value, share
        return cut

    v = [part.numpy() for part in (values.members, values.others, values.target_members, values.target_others)]
    y = [part.numpy() for part in (labels.members, labels.others, labels.target_members, labels.target_others)]
    members = others = 0
    for label in range(classes):
        cut = setting(v[0][y[0] == label], v[1][y[1] == label])
        members += np.sum(v[2][y[2] == label] >= cut)
        others += np.sum(v[3][y[3] == label] < cut)
    return float(0.5 * (members / len(y[2]) + others / len(y[3])))


@pytest.mark.parametrize("sign", [1, -1])
def test_reference_mode_equals_the_published_loops(sign: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (80, 60, 30, 40)
    values = Pool(*(sign * torch.rand(size, generator=generator).mul(20).round().div(20) for size in sizes))
    labels = [torch.randint(0, 12, (size,), generator=generator) for size in sizes]
    labels[0][labels[0] == 3] = 4  # a forgotten class: without shadow members
    pool = Pool(*labels)
    assert threshold_attack(values, pool, "reference").score == pytest.approx(published(values, pool), abs=1e-12)


def test_corrected_mode_does_not_depend_on_the_order() -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.rand(50, generator=generator).mul(9).round() for _ in range(4)]
    labels = [torch.randint(0, 3, (50,), generator=generator) for _ in range(4)]
    order = torch.randperm(50, generator=generator)
    moved = [part[order] if place < 2 else part for place, part in enumerate(values)]
    moved_labels = [part[order] if place < 2 else part for place, part in enumerate(labels)]
    first, second = threshold_attack(Pool(*values), Pool(*labels)), threshold_attack(Pool(*moved), Pool(*moved_labels))
    assert torch.equal(first.members, second.members)
    assert torch.equal(first.others, second.others)


def test_svc_separates_what_is_separable() -> None:
    found = svc_attack(Pool(t(0.9, 0.95, 0.97), t(0.1, 0.2, 0.05), t(0.93, 0.1), t(0.15, 0.92, 0.12)))
    assert found.members.tolist() == [True, False]
    assert found.others.tolist() == [True, False, True]


def test_svc_is_the_published_one() -> None:
    from sklearn.svm import SVC

    generator = torch.Generator().manual_seed(2)
    rows = [
        torch.rand(size, 4, generator=generator, dtype=torch.float64) + shift
        for size, shift in ((60, 0.3), (20, 0), (15, 0.3), (25, 0))
    ]
    machine = SVC(C=3, gamma="auto", kernel="rbf")
    machine.fit(torch.cat(rows[:2]).numpy(), np.concatenate([np.ones(60), np.zeros(20)]))
    expected = (machine.predict(rows[2].numpy()).mean() + 1 - machine.predict(rows[3].numpy()).mean()) / 2
    assert svc_attack(Pool(*rows)).score == pytest.approx(expected)


def test_area_under_curve_counts_pairs() -> None:
    members, others = t(3, 1, 2, 2), t(0, 2, 1)
    pairs = [(m > o) + 0.5 * (m == o) for m in members.tolist() for o in others.tolist()]
    assert area_under_curve(members, others) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(t(2, 3), t(0, 1)) == 1
    assert area_under_curve(t(1, 1), t(1, 1)) == 0.5


def test_rate_at_false_positives() -> None:
    others = torch.arange(200, dtype=torch.float64)
    # 1 % of 200 are two: 199 and 198 may exceed the cut, 197 is it.
    assert rate_at_false_positives(t(197, 197.5, 300, 0), others) == 0.5
    assert rate_at_false_positives(t(5, 6), t(5, 1)) == 0.5


def test_guesses_are_means() -> None:
    found = Guesses(torch.tensor([True, True, False, True]), torch.tensor([False, True]))
    assert (found.true_positive_rate, found.true_negative_rate, found.score) == (0.75, 0.5, 0.625)
