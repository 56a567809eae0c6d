"""The logit mask: forgotten classes are never predicted, and nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.forgotten import forgotten_classes
from unmerge.baselines.samples import Data
from unmerge.data.batches import Forward, classifier_logits
from unmerge.editing.rewriting import REMOVED_BIAS


class LogitMask(nn.Module):
    """A model whose logits of some classes are constant and below all others; its features are untouched."""

    classes: Tensor

    def __init__(self, model: nn.Module, classes: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        device = next((tensor.device for tensor in model.parameters()), None)
        self.register_buffer("classes", torch.tensor(list(classes), device=device), persistent=False)
        self.training = model.training

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns, with its logits masked."""
        output = self.model(*inputs, **named)
        logits = classifier_logits(output)
        return _with_logits(output, logits.index_fill(1, self.classes, REMOVED_BIAS))


def logit_mask(
    model: nn.Module,
    forget: Data,
    retain: Data | None = None,
    *,
    classes: Sequence[int] | None = None,
    forward: Forward | None = None,
    seed: int = 0,
) -> nn.Module:
    """A copy of the model behind a `LogitMask` of the forgotten classes: the control that unlearns nothing.

    classes: the classes to mask; by default those of forget's labels that retain does not have. With them, only
        the first batch of forget is read, and retain not at all.
    """
    with working_copy(model, seed) as result:
        return LogitMask(result, forgotten_classes(result, forget, retain, classes, forward))


def _with_logits(output: Any, logits: Tensor) -> Any:
    """The output with other logits, in its own form."""
    if isinstance(output, Tensor):
        return logits
    if hasattr(output, "logits"):
        changed = copy(output)
        changed.logits = logits
        return changed
    if isinstance(output, Mapping):
        return {**output, "logits": logits}
    rest = (logits, *output[1:])
    return type(output)(*rest) if hasattr(output, "_fields") else type(output)(rest)
