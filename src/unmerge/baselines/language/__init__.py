"""Gradient methods that make a language model forget, each `method(model, forget, retain, **options)`.

forget, retain: batches with input_ids, attention_mask and labels (-100 where there is no loss). Every method returns a
new model and leaves the given one as it was; all take the fields of `LanguageTraining`.
"""

from collections.abc import Callable

from torch import nn

from unmerge.baselines.language.graddiff import grad_diff
from unmerge.baselines.language.npo import npo
from unmerge.baselines.language.rmu import rmu
from unmerge.baselines.language.training import LanguageTraining

METHODS: dict[str, Callable[..., nn.Module]] = {"grad_diff": grad_diff, "npo": npo, "rmu": rmu}

__all__ = ["METHODS", "LanguageTraining", "grad_diff", "npo", "rmu"]
