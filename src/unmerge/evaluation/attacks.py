"""Attackers that tell members from others: per-class thresholds, support vector machines, and plain rankings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unmerge.evaluation.subject import NotMeasurable

Mode = Literal["corrected", "reference"]
PUBLIC_CLASSES = 10  # how many the public threshold attack looks at, whatever the data set has


@dataclass(frozen=True)
class Pool:
    """A signal on four sets of samples: those an attacker learns from, and those it is tried on."""

    members: Tensor
    others: Tensor
    target_members: Tensor
    target_others: Tensor


@dataclass(frozen=True)
class Guesses:
    """Whether the attacker is right, for each member and each non-member it is tried on."""

    members: Tensor
    others: Tensor

    @property
    def true_positive_rate(self) -> float:
        return self.members.double().mean().item()

    @property
    def true_negative_rate(self) -> float:
        return self.others.double().mean().item()

    @property
    def score(self) -> float:
        return (self.true_positive_rate + self.true_negative_rate) / 2


def threshold(members: Tensor, others: Tensor) -> float:
    """The value t that maximises ½(P(member ≥ t) + P(other < t)); of equal ones the first in the given order."""
    values = torch.cat([members, others])
    at_least = len(members) - torch.searchsorted(members.sort().values, values)
    below = torch.searchsorted(others.sort().values, values)
    balanced = 0.5 * (at_least.double() / len(members) + below.double() / len(others))
    return values[balanced.argmax()].item()


def threshold_attack(values: Pool, labels: Pool, mode: Mode = "corrected") -> Guesses:
    """Guess by a threshold for each class, a sample at or above it being a member.

    A class that lacks shadow members (a forgotten one) or shadow non-members has no threshold of its own and
    takes that of all classes together. The public code (`mode="reference"`) leaves it at 0, so that its
    guesses are constant, and looks only at the first ten classes: samples of others count as wrong.
    """
    public = mode == "reference"
    classes = torch.cat([labels.target_members, labels.target_others]).unique().tolist()
    if public:
        classes = [label for label in classes if label < PUBLIC_CLASSES]
    overall = 0.0 if public else _ordered_threshold(values.members, values.others)
    right_members = torch.zeros(len(values.target_members), dtype=torch.bool)
    right_others = torch.zeros(len(values.target_others), dtype=torch.bool)
    for label in classes:
        members = values.members[labels.members == label]
        others = values.others[labels.others == label]
        cut = overall
        if len(members) and len(others):
            cut = threshold(members, others) if public else _ordered_threshold(members, others)
        right_members |= (labels.target_members == label) & (values.target_members >= cut)
        right_others |= (labels.target_others == label) & (values.target_others < cut)
    return Guesses(right_members, right_others)


def svc_attack(values: Pool) -> Guesses:
    """Guess by a support vector machine with an RBF kernel, C = 3 and no class weights, one row a sample."""
    try:
        from sklearn.svm import SVC
    except ImportError as error:
        raise NotMeasurable("the SVC attacks need scikit-learn: pip install 'unmerge[eval]'") from error
    shadow = torch.cat([values.members, values.others])
    is_member = torch.cat([torch.ones(len(values.members)), torch.zeros(len(values.others))])
    machine = SVC(C=3, gamma="auto", kernel="rbf").fit(_rows(shadow).numpy(), is_member.numpy())
    members, others = (
        torch.from_numpy(machine.predict(_rows(target).numpy()))
        for target in (values.target_members, values.target_others)
    )
    return Guesses(members == 1, others == 0)


def area_under_curve(members: Tensor, others: Tensor) -> float:
    """The probability that a member scores above a non-member, ties counting half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, members)
    up_to = torch.searchsorted(ordered, members, right=True)
    return ((below + up_to).double().mean() / (2 * len(others))).item()


def rate_at_false_positives(members: Tensor, others: Tensor, allowed: float = 0.01) -> float:
    """The share of members above a score that at most the allowed share of non-members exceeds."""
    cut = others.sort(descending=True).values[int(allowed * len(others))]
    return (members > cut).double().mean().item()


def _ordered_threshold(members: Tensor, others: Tensor) -> float:
    """The smallest best threshold, whatever the order of the samples."""
    return threshold(members.sort().values, others.sort().values)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)
