"""Membership inference on texts: whether forgotten answers look more familiar to a model than ones it never saw.

Every signal is higher for a text that the model knows less. OpenUnlearning's definitions.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from unmerge.evaluation.language.scoring import TokenScores

SHARE = 0.4  # of the tokens that min-k looks at


def signals(scores: TokenScores, texts: Sequence[str], base: TokenScores | None = None) -> dict[str, Tensor]:
    """Each attack's signal for each text; "reference" only where the scores of a base model are given."""
    found = {
        "loss": scores.losses,
        "zlib": scores.losses / torch.tensor([len(zlib.compress(text.encode())) for text in texts]),
        "min_k": least_likely(scores),
        "min_k_plus_plus": least_likely(scores, standardised=True),
    }
    if base is not None:
        found["reference"] = scores.losses - base.losses
    return found


def least_likely(scores: TokenScores, share: float = SHARE, standardised: bool = False) -> Tensor:
    """Min-k: minus the mean of the smallest log-probabilities of each answer; min-k++ with standardised ones."""
    values = scores.log_probs
    if standardised:
        values = (values - scores.expected) / scores.spread.clamp_min(1e-6)
    kept = [(answer, max(1, int(share * len(answer)))) for answer in scores.answers(values)]
    return torch.stack([-answer.topk(count, largest=False).values.mean() for answer, count in kept])


def auc(forget: Tensor, holdout: Tensor) -> float:
    """How often a held-out text has the higher signal, ties counting half: 1 where forget is known, .5 where not."""
    own, other = holdout.double().unsqueeze(1), forget.double()
    return float((own > other).double().mean() + (own == other).double().mean() / 2)


def privacy_leak(own: float, retrained: float) -> float:
    """PrivLeak, in percent: 0 as the retrained model, negative where forgotten texts are still familiar."""
    return 100 * ((1 - own) - (1 - retrained)) / max(1 - retrained, 1e-10)
