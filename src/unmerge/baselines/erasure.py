"""LEACE (Belrose et al. 2023): the least change of the features after which nothing linear tells forgotten classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.forgotten import forgotten_classes
from unmerge.baselines.samples import Data
from unmerge.collecting.collection import collect
from unmerge.data.batches import Forward
from unmerge.errors import LayerError
from unmerge.model.layers import head_of

_RANK = 1e-6  # of the largest eigenvalue: below it directions are those of rounding, as sums may be in float32


def leace(
    model: nn.Module,
    forget: Data,
    retain: Data,
    *,
    classes: Sequence[int] | None = None,
    forward: Forward | None = None,
    seed: int = 0,
) -> nn.Module:
    """A copy of the model that erases the forgotten classes from the classifier's inputs; its weights are untouched.

    The classifier becomes `Sequential(eraser, classifier)`. Erased is, in one affine map, whatever covaries with the
    indicator of each forgotten class over forget and retain, so that a linear probe of the features is left with
    guessing. Layers before it know what they knew.

    classes: the classes to erase; by default those of forget's labels that retain does not have.
    """
    with working_copy(model, seed) as result:
        forgotten = forgotten_classes(result, forget, retain, classes, forward)
        name = head_of(result)
        head = result.get_submodule(name)
        if not isinstance(head, nn.Linear):
            raise LayerError(f"the classifier {name!r} is a {type(head).__name__}; LEACE erases what a Linear reads.")
        whole = collect(result, forget, [name], forward=forward, what="forget")
        whole += collect(result, retain, whole, forward=forward, what="retain")
        layer = whole[name]
        places = torch.tensor([whole.classes.index(label) for label in forgotten], device=layer.device)
        rows = layer.class_rows[places].unsqueeze(1)
        mean = layer.moments.mean.double()
        covariances = (layer.class_sums[places] - rows * mean).mT / layer.moments.n
        eraser = _eraser(covariances, layer.moments.scatter.double() / layer.moments.n, mean).to(head.weight)
        eraser.train(head.training)
        erased = nn.Sequential(eraser, head).train(head.training)
        if not name:  # the model is the classifier
            return erased
        result.set_submodule(name, erased)
        return result


def _eraser(concept: Tensor, covariance: Tensor, mean: Tensor) -> nn.Linear:
    """x − S (Sᵀ Σ⁺ S)⁺ Sᵀ Σ⁺ (x − mean) with S = Cov(x, z), in float64: of all affine maps after which x and z do not
    covary the one that moves x least in the mean square."""
    detector = torch.linalg.pinv(covariance, rtol=_RANK, hermitian=True) @ concept
    erased = concept @ torch.linalg.pinv(concept.mT @ detector, rtol=_RANK, hermitian=True) @ detector.mT
    found = nn.Linear(len(mean), len(mean), device=mean.device, dtype=mean.dtype).requires_grad_(False)
    found.weight.copy_(torch.eye(len(mean), device=mean.device) - erased)
    found.bias.copy_(erased @ mean)
    return found.requires_grad_(True)
