"""The classifier behind edited layers, so that retained data keep their answers: a ridge regression, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, device_of, feed, labels_of, on_device
from unmerge.data.reading import Reading
from unmerge.data.unread import unread_labels
from unmerge.distributed.processes import add_up_
from unmerge.editing import lengthening
from unmerge.editing.layer_edit import LayerEdit
from unmerge.editing.recalibration import RECALIBRATION_SAMPLES
from unmerge.editing.rewriting import REMOVED_BIAS
from unmerge.errors import DataError
from unmerge.model.evaluating import evaluating
from unmerge.model.layers import tensor_name
from unmerge.placement.sharded import split_like, whole
from unmerge.placement.state import state_of
from unmerge.placement.writing import holding

if TYPE_CHECKING:
    from unmerge.editing.edit import Edit


_WEIGHT_OF_FORGOTTEN = 0.2  # in the regression, that of the retained data being 1 (docs/findings.md)


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
    forget: counts beside them, with a fifth of their weight: there the answer lacks what the edit took beside the mean
    of a class, W (t − t_c) with t = f − e, and what makes the mean answer `answer_length` times as long.
    before: the tensors that the edit changed, as they were.
    """
    head, ridge = edit.head, edit.recipe.refit
    if ridge is None or not edit.recipe.traits.dosed or head not in edit.layers:
        return {}
    rows = _rows_left(model, head, edit.layers[head])
    if rows is None:
        return {}
    state = state_of(model)
    weight, bias = _classifier(head, state)
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
        spread, lacks = _of_forgotten(edit, model, before, forget, forward, rows, products[:size], centre)
        scatter += _WEIGHT_OF_FORGOTTEN * spread
        lacking += _WEIGHT_OF_FORGOTTEN * lacks
    change = torch.cholesky_solve(lacking.mT, torch.linalg.cholesky(scatter)).mT * rows[:, None]
    values = {"weight": weight + change, "bias": bias - change @ centre}
    return {
        tensor_name(head, part): split_like(value.to(weight.dtype), state[tensor_name(head, part)])
        for part, value in values.items()
    }


def _of_forgotten(
    edit: Edit,
    model: nn.Module,
    before: Mapping[str, Tensor],
    forget: Iterable[Any],
    forward: Forward | None,
    rows: Tensor,
    retained: Tensor,
    centre: Tensor,
) -> tuple[Tensor, Tensor]:
    """Both sides of the regression over forgotten data, e taken from the centre of the retained ones.

    rows: the outputs that are left. retained: Σ e eᵀ over retained data, per sample.
    """
    assert edit.head is not None  # else there is nothing to refit
    head, size, classes = edit.head, len(centre), _classes_of(edit)
    seen = _moments(model, head, before, forget, "forget", forward, classes=classes).to(centre)
    counts = seen[-1, size:]
    if not counts.any():
        raise DataError(
            "no sample of forget= reaches the classifier. Pass whole batches, and a forward= that calls it."
        )
    shares, products = counts / counts.sum(), seen[:-1, :size] / counts.sum()
    left, taken = (seen[:-1, size:] / counts.clamp_min(1)).chunk(2)  # the means of each class
    state = state_of(model)
    weight, bias = (value.to(seen) for value in _classifier(head, state))
    answers = weight @ left + bias[:, None]
    answers -= answers[rows].mean(0)  # which a softmax does not see
    times: float | str | Tensor = edit.recipe.answer_length
    if isinstance(times, str):
        typical = lengthening.typical_length(weight[rows], bias[rows], retained, centre)
        first_weight, first_bias = (value.to(seen) for value in _classifier(head, before, state))
        nearest = lengthening.nearest_goes(first_weight @ (left + taken) + first_bias[:, None], classes)
        times = lengthening.factors(answers[rows].norm(dim=0), typical, nearest)
    offset = left @ shares - centre
    scatter = products[:size] - torch.outer(offset + centre, offset + centre) + torch.outer(offset, offset)
    beside = products[size:] - (taken * shares) @ left.mT
    longer = ((times - 1) * answers * shares) @ (left - centre[:, None]).mT
    return scatter, weight @ beside + longer


def _classifier(head: str, *states: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Its weight and bias, of the first of the states that has them."""
    weight, bias = (
        next(whole(state[name]).detach() for state in states if name in state)
        for name in (tensor_name(head, part) for part in ("weight", "bias"))
    )
    return weight, bias


def _rows_left(model: nn.Module, head: str, edit: LayerEdit) -> Tensor | None:
    """Which outputs of a linear classifier an edit leaves alone: those of retained classes. None of another one."""
    module = model.get_submodule(head)
    if not isinstance(module, nn.Linear) or module.bias is None or edit.B.dim() != 2:
        return None
    bias = _classifier(head, state_of(model))[1]
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
    classes: Sequence[int] = (),
) -> Tensor:
    """Σ [e; f − e; 1] [e; k]ᵀ over the classifier's inputs e, which were f before the edit.

    k: 1 in the place of the class, or for all data without `classes`.
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
    columns = size + max(1, len(classes))
    total = torch.zeros(2 * size + 1, columns, dtype=torch.float64, device=device_of(model))
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
                places = _places(piece.batch, len(edited), what, classes)
                part = left.mT @ torch.cat([edited, places.to(edited)], 1)
                total = total.to(part.device) + part
    finally:
        hook.remove()
    total = add_up_(total)
    if not total.isfinite().all():
        raise DataError(f"the inputs of the classifier {head!r} are not finite; look at the batches of {what}=.")
    return total


def _places(batch: Any, rows: int, what: str, classes: Sequence[int]) -> Tensor:
    """(rows, classes): 1 in the column of each row's class."""
    labels = labels_of(batch) if classes else None
    if labels is None:
        if len(classes) > 1:
            hint = unread_labels(batch) or "pass batches (inputs, labels)"
            raise DataError(f"{what}= has no labels, and this edit forgets the classes {list(classes)}: {hint}.")
        return torch.ones(rows, 1)
    places = labels.long().unsqueeze(1) == torch.tensor(classes, device=labels.device)
    strange = labels[~places.any(1)]
    if len(strange):
        raise DataError(
            f"{what}= holds the class {int(strange[0])}, and this edit forgets {list(classes)}. Pass batches of these "
            "alone."
        )
    if rows % max(1, len(labels)):
        raise DataError(
            f"the classifier gets {rows} rows for {len(labels)} samples of {what}=, so their classes are open. Pass a "
            "forward= that calls it with one row a sample, leave forget= out, or refit nothing: Recipe(refit=None)."
        )
    return places.repeat(rows // max(1, len(labels)), 1)  # forward= may call it several times


def _classes_of(edit: Edit) -> list[int]:
    """The classes that it forgets, of all edits that it is composed of."""

    def of(provenance: Mapping[str, Any]) -> set[int]:
        parts = provenance.get("composed_of", [])
        return {*provenance.get("classes", [])}.union(*(of(part) for part in parts))

    return sorted(of(edit.provenance) | set(edit.removed))
