"""What an edit is compared with: unlearning methods and controls, each `method(model, forget, retain, **options)`.

Every method returns a new module and leaves the given one as it was. All take `seed=` and `forward=`; those that
train also take the fields of `Training`.
"""

from collections.abc import Callable

from torch import nn

from unmerge.baselines.consensus import neg_merge
from unmerge.baselines.copies import unedited
from unmerge.baselines.erasure import leace
from unmerge.baselines.finetuning import fine_tune
from unmerge.baselines.masking import LogitMask, logit_mask
from unmerge.baselines.neggrad import neggrad_plus
from unmerge.baselines.options import BaselineError
from unmerge.baselines.projection import kodge
from unmerge.baselines.relabelling import random_label
from unmerge.baselines.removal import head_removal
from unmerge.baselines.retraining import retrain
from unmerge.baselines.saliency import salun
from unmerge.baselines.selection import Candidate
from unmerge.baselines.task_vectors import neg_tv
from unmerge.baselines.training import Training

METHODS: dict[str, Callable[..., nn.Module]] = {
    "unedited": unedited,
    "logit_mask": logit_mask,
    "head_removal": head_removal,
    "fine_tune": fine_tune,
    "neggrad_plus": neggrad_plus,
    "random_label": random_label,
    "salun": salun,
    "neg_tv": neg_tv,
    "neg_merge": neg_merge,
    "kodge": kodge,
    "leace": leace,
    "retrain": retrain,
}

__all__ = [
    "METHODS",
    "BaselineError",
    "Candidate",
    "LogitMask",
    "Training",
    "fine_tune",
    "head_removal",
    "kodge",
    "leace",
    "logit_mask",
    "neg_merge",
    "neg_tv",
    "neggrad_plus",
    "random_label",
    "retrain",
    "salun",
    "unedited",
]
