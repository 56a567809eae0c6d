"""The classifier behind edited layers, so that retained data keep their answers: a ridge regression, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, device_of, feed, labels_of, on_device
from unmerge.data.reading import Reading
from unmerge.distributed.processes import add_up_
from unmerge.editing.layer_edit import LayerEdit
from unmerge.editing.recalibration import RECALIBRATION_SAMPLES
from unmerge.editing.rewriting import REMOVED_BIAS
from unmerge.errors import DataError
from unmerge.model.evaluating import evaluating
from unmerge.model.layers import tensor_name
from unmerge.placement.sharded import Whole, split_like
from unmerge.placement.state import state_of
from unmerge.placement.writing import holding

if TYPE_CHECKING:
    from unmerge.editing.edit import Edit


_FORGOTTEN = 0.2  # weight of forgotten data in the regression, that of retained ones being 1 (docs/findings.md)


def refits(edit: Edit) -> bool:
    """Whether the classifier is one of those that are refitted."""
    return edit.recipe.refit is not None and edit.recipe.traits.dosed and edit.head in edit.layers


def refitted(
    edit: Edit,
    model: nn.Module,
    before: Mapping[str, Tensor],
    retain: Iterable[Any],
    forget: Iterable[Any] | None,
    forward: Forward | None,
) -> dict[str, Tensor]:
    """The classifier's weight and bias with which retained data get the answers from before; empty where it stays.

    An edit takes a little of every retained image along. What it took, f − e, is as far as possible told from what it
    left: W (I + Cov(f − e, e) (Cov(e) + ridge · mean eigenvalue)⁻¹). The mean answer is left as it is.
    forget: counts beside them. There the edit is to have taken nothing beside the mean of each class, and the mean
    answers that it left are made `answer_length` times as long.
    before: the tensors that the edit changed, as they were.
    """
    head, ridge = edit.head, edit.recipe.refit
    if not refits(edit) or head is None or ridge is None:
        return {}
    rows = _rows_left(model, head, edit.layers[head])
    if rows is None:
        return {}
    state = state_of(model)
    whole = Whole(state)
    weight, bias = (whole[tensor_name(head, part)].detach() for part in ("weight", "bias"))
    seen = _moments(model, head, before, retain, "recalibrate", forward, samples=RECALIBRATION_SAMPLES)
    count = seen[-1, -1].item()
    if not count:
        return {}  # forward= ends before the classifier
    size = seen.shape[1] - 1
    seen = seen.to(weight.device) / count  # which offloading may keep elsewhere
    products, means = seen[:-1, :size], seen[:-1, size]
    centre = means[:size]
    scatter = products[:size] - torch.outer(centre, centre)
    lacking = weight.to(seen) @ (products[size:] - torch.outer(means[size:], centre))
    ridge = max(ridge, size / (2 * count))  # few samples need more
    level = scatter.diagonal().mean()
    scatter += ridge * torch.where(level > 0, level, 1.0) * torch.eye(size).to(scatter)
    if forget is not None:
        lost = _moments(model, head, before, forget, "forget", forward, classes=len(weight)).to(weight.device)
        terms = _of_forgotten(lost, weight.to(seen), bias.to(seen), rows, centre, edit.recipe.answer_length)
        for total, term in zip((scatter, lacking), terms, strict=True):
            total += _FORGOTTEN * term
    change = torch.cholesky_solve(lacking.mT, torch.linalg.cholesky(scatter)).mT * rows[:, None]
    values = {"weight": weight + change, "bias": bias - change @ centre}
    return {
        tensor_name(head, part): split_like(value.to(weight.dtype), state[tensor_name(head, part)])
        for part, value in values.items()
    }


def _of_forgotten(
    seen: Tensor, weight: Tensor, bias: Tensor, rows: Tensor, centre: Tensor, length: float
) -> tuple[Tensor, Tensor]:
    """Both sides of the regression over forgotten data, e taken from the centre of the retained ones."""
    size = len(centre)
    counts = seen[-1, size:]
    there = counts > 0
    shares = counts[there] / counts.sum()
    products, means = seen[:-1, :size] / counts.sum(), seen[:-1, size:][:, there] / counts[there]
    offset = means[:size] @ shares - centre
    scatter = products[:size] - torch.outer(offset + centre, offset + centre) + torch.outer(offset, offset)
    taken = products[size:] - (means[size:] * shares) @ means[:size].mT
    answers = weight @ means[:size] + bias[:, None]
    answers = torch.where(rows[:, None], answers - answers[rows].mean(0), 0.0)  # what a softmax sees of them
    longer = (length - 1) * (answers * shares) @ (means[:size] - centre[:, None]).mT
    return scatter, weight @ taken + longer


def _rows_left(model: nn.Module, head: str, edit: LayerEdit) -> Tensor | None:
    """Which outputs of a linear classifier an edit leaves alone: those of retained classes. None of another one."""
    module = model.get_submodule(head)
    if not isinstance(module, nn.Linear) or module.bias is None or edit.B.dim() != 2:
        return None
    bias = Whole(state_of(model))[tensor_name(head, "bias")]
    gone = bias == torch.tensor(REMOVED_BIAS, dtype=bias.dtype, device=bias.device)
    left = ~gone & (edit.B == 0).all(1).to(bias.device)
    return left if left.any() else None


def _moments(
    model: nn.Module,
    head: str,
    before: Mapping[str, Tensor],
    data: Iterable[Any],
    what: str,
    forward: Forward | None,
    *,
    samples: int | None = None,
    classes: int = 1,
) -> Tensor:
    """Σ [e; f − e; 1] [e; k]ᵀ over the classifier's inputs e, which were f before the edit.

    k: 1 in the place of the class, of which data without labels have one.
    """
    seen: list[Tensor] = []
    module = model.get_submodule(head)
    assert isinstance(module, nn.Linear)  # else it has no rows_left

    def see(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append((args[0] if args else kwargs["input"]).detach().flatten(0, -2).double())

    def both(model: nn.Module, batch: Any) -> None:
        with evaluating(model):  # so that the second pass draws the same random numbers
            feed(model, batch, forward)
        with holding(model, before):
            feed(model, batch, forward)

    hook = module.register_forward_pre_hook(see, with_kwargs=True)
    size = module.in_features
    total = torch.zeros(2 * size + 1, size + classes, dtype=torch.float64, device=device_of(model))
    try:
        with evaluating(model):
            # Of a model in parts each process makes both passes, also one that has no batch left.
            for piece in Reading(model, data, what, both, samples=samples):
                seen.clear()
                feed(model, on_device(model, piece.batch), both)
                if not seen:
                    break
                edited, original = torch.cat(seen).chunk(2)
                left = torch.cat([edited, original - edited, edited.new_ones(len(edited), 1)], 1)
                labels = labels_of(piece.batch) if classes > 1 else None
                part = left.mT @ torch.cat([edited, _places(labels, edited, what, classes)], 1)
                total = total.to(part.device) + part
    finally:
        hook.remove()
    total = add_up_(total)
    if not total.isfinite().all():
        raise DataError(f"the inputs of the classifier {head!r} are not finite; look at the batches of {what}=.")
    return total


def _places(labels: Tensor | None, rows: Tensor, what: str, classes: int) -> Tensor:
    """(rows, classes): 1 in the column of each row's class."""
    if labels is None or len(labels) != len(rows):
        labels = torch.zeros(len(rows), dtype=torch.int64)
    strange = labels[(labels < 0) | (labels >= classes)]
    if len(strange):
        raise DataError(
            f"{what}= has the label {strange[0].item()}; expected 0 to {classes - 1}, the outputs of the classifier."
        )
    return nn.functional.one_hot(labels.long(), classes).to(rows)
