"""The classifier behind edited layers, so that retained data keep their answers: a ridge regression, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, device_of, feed, on_device
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


def refitted(
    edit: Edit, model: nn.Module, before: Mapping[str, Tensor], data: Iterable[Any], forward: Forward | None
) -> dict[str, Tensor]:
    """The classifier's weight and bias with which retained data get the answers from before; empty where it stays.

    An edit takes a little of every retained image along. What it took, f − e, is as far as possible told from what it
    left: W (I + Cov(f − e, e) (Cov(e) + ridge · mean eigenvalue)⁻¹). The mean answer is left as it is.
    before: the tensors that the edit changed, as they were.
    """
    head, ridge = edit.head, edit.recipe.refit
    if ridge is None or not edit.recipe.traits.dosed or head not in edit.layers:
        return {}
    rows = _rows_left(model, head, edit.layers[head])
    if rows is None:
        return {}
    state = state_of(model)
    whole = Whole(state)
    weight, bias = (whole[tensor_name(head, part)].detach() for part in ("weight", "bias"))
    moments = _moments(model, head, before, data, forward).to(weight.device)  # which offloading may keep elsewhere
    size = moments.shape[1] - 1
    count = moments[-1, -1]
    if not count:
        return {}  # forward= ends before the classifier
    if not moments.isfinite().all():
        raise DataError(f"the inputs of the classifier {head!r} are not finite; look at the batches of recalibrate=.")
    means = moments[:, -1] / count
    scatter = moments[:size, :size] / count - torch.outer(means[:size], means[:size])
    taken = moments[size:-1, :size] / count - torch.outer(means[size:-1], means[:size])
    ridge = max(ridge, size / (2 * count.item()))  # few samples need more
    level = scatter.diagonal().mean()
    scatter += ridge * torch.where(level > 0, level, 1.0) * torch.eye(size).to(scatter)
    lacking = (weight.to(taken) @ taken).mT
    change = torch.cholesky_solve(lacking, torch.linalg.cholesky(scatter)).mT * rows[:, None]
    values = {"weight": weight + change, "bias": bias - change @ means[:size]}
    return {
        tensor_name(head, part): split_like(value.to(weight.dtype), state[tensor_name(head, part)])
        for part, value in values.items()
    }


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
    model: nn.Module, head: str, before: Mapping[str, Tensor], data: Iterable[Any], forward: Forward | None
) -> Tensor:
    """Σ [e; f − e; 1] [e; 1]ᵀ over the classifier's inputs e, which were f before the edit."""
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
    total = torch.zeros(2 * size + 1, size + 1, dtype=torch.float64, device=device_of(model))
    try:
        with evaluating(model):
            # Of a model in parts each process makes both passes, also one that has no batch left.
            for piece in Reading(model, data, "recalibrate", both, samples=RECALIBRATION_SAMPLES):
                seen.clear()
                feed(model, on_device(model, piece.batch), both)
                if not seen:
                    break
                edited, original = torch.cat(seen).chunk(2)
                one = edited.new_ones(len(edited), 1)
                part = torch.cat([edited, original - edited, one], 1).mT @ torch.cat([edited, one], 1)
                total = total.to(part.device) + part
    finally:
        hook.remove()
    return add_up_(total)
