"""Head removal: the classifier's rows of the forgotten classes are taken out, all other weights stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.forgotten import forgotten_classes
from unmerge.baselines.samples import Data
from unmerge.baselines.training import predict
from unmerge.collecting.probe import output_layer
from unmerge.data.batches import PROBE_SAMPLES, Forward, first_batch, first_samples, on_device
from unmerge.editing.rewriting import REMOVED_BIAS
from unmerge.errors import LayerError, suggest
from unmerge.model.evaluating import evaluating
from unmerge.model.layers import candidates, head_of, is_transposed


def head_removal(
    model: nn.Module,
    forget: Data,
    retain: Data | None = None,
    *,
    classes: Sequence[int] | None = None,
    head: str | None = None,
    forward: Forward | None = None,
    seed: int = 0,
) -> nn.Module:
    """A copy of the model whose forgotten rows of the classifier are 0 with a bias of −1e4, as in an edit.

    classes: the classes to take out; by default those of forget's labels that retain does not have. With them, only
        the first batch of forget is read, and retain not at all.
    head: the name of the classifier; by default the linear layer whose output the model returns, or else the last one.
    """
    with working_copy(model, seed) as result:
        rows = forgotten_classes(result, forget, retain, classes, forward)
        with evaluating(result):
            few = on_device(result, first_samples(first_batch(forget, "forget"), PROBE_SAMPLES))
            name = head if head is not None else output_layer(result, few, forward) or head_of(result)
        known = candidates(result)
        if name not in known:
            raise LayerError(f"head={name!r} is no convolution or linear layer. {suggest(name, known)}")
        layer = known[name]
        bias = layer.bias
        if not isinstance(bias, Tensor):
            raise LayerError(f"the classifier {name!r} has no bias to keep removed classes down. Use logit_mask.")
        weight = layer.get_parameter("weight")
        if len(bias) > max(rows):
            with torch.no_grad():
                (weight.mT if is_transposed(layer) else weight)[rows] = 0
                bias[rows] = REMOVED_BIAS
            torch.clear_autocast_cache()  # of half-precision copies from before
        # The layer proves itself: only the classifier's rows are the model's logits.
        with evaluating(result):
            removed = predict(result, few, forward)[:, rows]
        if not removed.allclose(torch.full_like(removed, REMOVED_BIAS), rtol=1e-2):
            raise LayerError(
                f"taking rows out of {name!r} did not take out the model's logits, so it is not the classifier. "
                "Name it with head=..."
            )
        return result
