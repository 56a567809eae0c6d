"""LEACE (Belrose et al. 2023): the least change of the features after which nothing linear tells forgotten classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.forgotten import forgotten_classes
from unmerge.baselines.samples import Data
from unmerge.collecting.collection import collect
from unmerge.collecting.probe import output_layer
from unmerge.data.batches import PROBE_SAMPLES, Forward, first_batch, first_samples, on_device
from unmerge.errors import LayerError, suggest
from unmerge.model.evaluating import evaluating
from unmerge.model.layers import candidates

_RANK = 1e-6  # of the largest eigenvalue: below it directions are those of rounding, as sums may be in float32


def leace(
    model: nn.Module,
    forget: Data,
    retain: Data,
    *,
    classes: Sequence[int] | None = None,
    head: str | None = None,
    forward: Forward | None = None,
    seed: int = 0,
) -> nn.Module:
    """A copy of the model that erases the forgotten classes from the classifier's inputs; its weights are untouched.

    The classifier becomes `Sequential(eraser, classifier)`. Erased is, in one affine map, whatever covaries with the
    indicator of each forgotten class over forget and retain, so that a linear probe of the features is left with
    guessing. Layers before it know what they knew.

    classes: the classes to erase; by default those of forget's labels that retain does not have.
    head: the name of the classifier; by default the linear layer whose output the model returns.
    """
    with working_copy(model, seed) as result:
        forgotten = forgotten_classes(result, forget, retain, classes, forward)
        name = _classifier(result, forget, head, forward)
        classifier = result.get_submodule(name)
        whole = collect(result, forget, [name], forward=forward, what="forget")
        whole += collect(result, retain, whole, forward=forward, what="retain")
        layer = whole[name]
        places = torch.tensor([whole.classes.index(label) for label in forgotten], device=layer.device)
        rows = layer.class_rows[places].unsqueeze(1)
        mean = layer.moments.mean.double()
        covariances = (layer.class_sums[places] - rows * mean).mT / layer.moments.n
        eraser = _eraser(covariances, layer.moments.scatter.double() / layer.moments.n, mean).to(
            classifier.get_parameter("weight")
        )
        erased = nn.Sequential(eraser, classifier).train(classifier.training)
        if not name:  # the model is the classifier
            return erased
        result.set_submodule(name, erased)
        return result


def _classifier(model: nn.Module, forget: Data, head: str | None, forward: Forward | None) -> str:
    """The name of the linear layer in front of which features are erased."""
    linear = [name for name, module in candidates(model).items() if isinstance(module, nn.Linear)]
    if head is None:
        with evaluating(model):
            few = on_device(model, first_samples(first_batch(forget, "forget"), PROBE_SAMPLES))
            head = output_layer(model, few, forward)
        if head is None:
            raise LayerError(
                "the model returns no linear layer's output, so its classifier is not known. Type head=..."
            )
    if head not in linear:
        raise LayerError(f"head={head!r} is no linear layer. {suggest(head, linear)}")
    return head


def _eraser(concept: Tensor, covariance: Tensor, mean: Tensor) -> nn.Linear:
    """x − S (Sᵀ Σ⁺ S)⁺ Sᵀ Σ⁺ (x − mean) with S = Cov(x, z), in float64: of all affine maps after which x and z do not
    covary the one that moves x least in the mean square."""
    detector = torch.linalg.pinv(covariance, rtol=_RANK, hermitian=True) @ concept
    erased = concept @ torch.linalg.pinv(concept.mT @ detector, rtol=_RANK, hermitian=True) @ detector.mT
    found = nn.Linear(len(mean), len(mean), device=mean.device, dtype=mean.dtype).requires_grad_(False)
    found.weight.copy_(torch.eye(len(mean), device=mean.device) - erased)
    found.bias.copy_(erased @ mean)
    return found.requires_grad_(True)
