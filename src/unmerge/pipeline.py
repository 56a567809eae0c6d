"""fit(): Algorithm 1, from two data sets and a checkpoint to an edit."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unmerge import solvers
from unmerge.batches import Forward, Mask, device_of
from unmerge.directions import Directions, directions
from unmerge.edit import Edit, LayerEdit
from unmerge.errors import EditError, LayerError, listing, warn
from unmerge.initial import Init, initial_weights
from unmerge.layers import is_transposed, tensor_name, weight_matrix
from unmerge.moments import full_precision
from unmerge.recipe import Recipe
from unmerge.request import Request, Source, request_of
from unmerge.statistics import Statistics
from unmerge.version import VERSION


def fit(
    model: nn.Module,
    forget: Source | None = None,
    retain: Source | None = None,
    *,
    init: Init,
    recipe: Recipe | None = None,
    classes: Sequence[int] | None = None,
    statistics: Statistics | None = None,
    mask: Mask = None,
    forward: Forward | None = None,
) -> Edit:
    """The edit that makes `model` forget `forget` and keep `retain`; the model itself is not changed.

    forget, retain: batches (a DataLoader, a list) or their `Statistics`. In their place `classes` and the
    `statistics` of everything, for whole classes. init: the weights before fine-tuning, "zero" when trained from
    scratch. mask, forward: as for `collect`.
    """
    recipe = recipe or Recipe()
    clock = Clock(device_of(model))
    with clock("statistics"):
        request = request_of(model, forget, retain, recipe, classes, statistics, mask, forward)
    names = request.layers(model, recipe)
    task_vectors = _task_vectors(model, init, names, recipe)

    layers: dict[str, LayerEdit] = {}
    known: dict[tuple[int, ...], Directions] = {}
    with full_precision(), torch.no_grad():
        for name in names:
            with clock("bases"):
                source = request.sources(name)
                basis = known[source] = known[source] if source in known else directions(request.pools(name), recipe)
                if basis.rank == 0:
                    _check_empty(name, request, recipe)
                    continue
            with clock("solve"):
                task_vector = weight_matrix(
                    model.get_submodule(name), task_vectors[tensor_name(name, "weight")]
                ).double()
                if basis.lift is not None:
                    coefficients = task_vector @ basis.lift
                else:
                    overlap = basis.forget.mT @ basis.retain
                    coefficients = _solve(task_vector @ basis.forget, overlap, recipe)
                layers[name] = _layer_edit(model, name, coefficients, basis, task_vectors, request, recipe)
    if not layers:
        raise LayerError(
            "no layer can be edited: the retain class means span the whole input of each. Use basis='lda'."
        )
    return _edit(model, layers, names, request, recipe, clock)


def _task_vectors(model: nn.Module, init: Init, names: list[str], recipe: Recipe) -> dict[str, Tensor]:
    """τ = W − W_init for the weights, and for the biases where they shrink."""
    own = dict(model.named_parameters(remove_duplicate=False))
    wanted = [tensor_name(name, "weight") for name in names]
    if recipe.bias == "shrink":
        wanted += [bias for name in names if (bias := tensor_name(name, "bias")) in own]
    initial = initial_weights(model, init, wanted)
    return {name: own[name].detach() - initial[name] for name in wanted}


def _solve(projection: Tensor, overlap: Tensor, recipe: Recipe) -> Tensor:
    if recipe.solver == "budgeted":
        return solvers.budgeted(projection, overlap, recipe.lam, recipe.gamma, recipe.steps, recipe.lr)
    if recipe.solver == "soft-threshold":
        return solvers.soft_threshold(projection, overlap, recipe.lam, recipe.gamma, recipe.delta)
    return solvers.exact(projection, overlap, recipe.lam, recipe.gamma)


def _layer_edit(
    model: nn.Module,
    name: str,
    coefficients: Tensor,
    basis: Directions,
    task_vectors: dict[str, Tensor],
    request: Request,
    recipe: Recipe,
) -> LayerEdit:
    """B, Q and the constant part of one layer, in the precision of its weight."""
    module = model.get_submodule(name)
    forget_basis = basis.forget
    if forget_basis.dim() == 3:
        # A group with fewer directions has zero columns; QR completes them, and their coefficients stay zero.
        forget_basis, upper = torch.linalg.qr(forget_basis)
        coefficients = coefficients @ upper.mT
    shift_to = request.statistics.shift_to[name]
    shift = torch.zeros(coefficients.shape[:-1].numel(), dtype=torch.float64, device=coefficients.device)
    if recipe.mean != "free":
        if shift_to is not None:
            # The edit acts on x − m_R: its constant part B Qᵀ m_R stays in the output.
            mean = request.retain_mean(name).to(coefficients.device)
            shift += (coefficients @ (forget_basis.mT @ mean.unsqueeze(-1))).flatten()
        elif recipe.mean == "preserve":
            raise LayerError(
                f"mean='preserve': layer {name!r} has no bias, and no BatchNorm is the only reader of its output, so "
                "nothing can take the constant. Leave it out with layers=..., or use mean='auto'."
            )
    weight, bias = tensor_name(name, "weight"), tensor_name(name, "bias")
    if bias in task_vectors:
        shift -= recipe.gamma / (1 + recipe.gamma) * task_vectors[bias].double()
        shift_to = bias
    kept = torch.promote_types(task_vectors[weight].dtype, torch.float32)
    has_shift = shift_to is not None and bool(shift.any())
    return LayerEdit(
        B=coefficients.to(kept),
        Q=forget_basis.to(kept),
        shift=shift.to(kept) if has_shift else None,
        shift_to=shift_to if has_shift else None,
        transposed=is_transposed(module),
    )


def _check_empty(name: str, request: Request, recipe: Recipe) -> None:
    """An empty basis is an error, but for private-mean, which skips such a layer."""
    if recipe.basis == "private-mean":
        return
    if recipe.basis.startswith("cav") and recipe.centering == "separate":
        why = (
            "with centering='separate' each class or cluster is compared with the mean of the forget set, and a single "
            "one is that mean. Use centering='retain', or basis='lda'"
        )
    elif recipe.basis == "deflated-pca":
        why = f"the {recipe.deflate} retain directions leave nothing of its input. Lower deflate"
    else:
        why = "the forget inputs do not differ from the retain inputs there. Leave it out with layers=..."
    raise LayerError(f"layer {name!r} has no forget direction: {why}.")


def _removed_rows(model: nn.Module, request: Request, names: list[str], recipe: Recipe) -> tuple[tuple[int, ...], str]:
    """The head's rows to take out, and why none where the recipe left the choice open."""
    if recipe.head in ("edit", "keep"):
        return (), ""
    head = request.head(model)
    module = model.get_submodule(head)
    width = weight_matrix(module).shape[0]
    if not request.classes:
        reason = "the request is not made of whole classes"
    elif request.statistics.head is None and recipe.head == "auto":
        reason = f"the output of {head!r} is not the output of the model"
    elif head not in names:
        reason = f"the classifier {head!r} is not among the edited layers"
    elif getattr(module, "bias", None) is None:
        reason = f"the classifier {head!r} has no bias"
    elif max(request.classes) >= width or min(request.classes) < 0:
        reason = f"label {max(request.classes)} is outside the {width} rows of the classifier {head!r}"
    else:
        return request.classes, ""
    if recipe.head == "remove":
        raise EditError(f"head='remove' cannot be done: {reason}. Use head='edit'.")
    return (), reason


def _edit(
    model: nn.Module,
    layers: dict[str, LayerEdit],
    names: list[str],
    request: Request,
    recipe: Recipe,
    clock: Clock,
) -> Edit:
    """The edit with its provenance: what it was made from, and what was left out, reduced or approximated."""
    removed, why_not_removed = _removed_rows(model, request, list(layers), recipe)
    notes: dict[str, Any] = {
        "left_out": dict(request.statistics.left_out),
        "spanned_by_retain": [name for name in names if name not in layers],
        "mean_left_free": [
            name for name in layers if recipe.mean != "free" and request.statistics.shift_to[name] is None
        ],
        "head_not_removed": why_not_removed,
        "approximations": [],
    }
    if request.whole is not None and recipe.basis != "private-mean":
        notes["approximations"].append("retain eigenvectors: all data less the means of the forgotten classes")
    reduced = {name: layer.rank for name, layer in layers.items() if layer.rank < recipe.rank}
    if recipe.basis in ("pca", "deflated-pca", "contrastive", "cav-kmeans") and reduced:
        notes["rank_reduced"] = reduced
        shown = listing(f"{name} to {rank}" for name, rank in reduced.items())
        warn(f"rank={recipe.rank} is more than the data supports and was reduced: {shown}.")
    head = request.head(model)
    if callable(recipe.layers):
        recipe = recipe.but(layers=names)
    edit = Edit(
        layers=layers,
        recipe=recipe,
        alpha=recipe.alpha if recipe.alpha is not None else 1.0 if removed else None,
        head=head if head in layers else None,
        removed=removed,
    )
    edit.weights.update({name: request.statistics.weights[name] for name in edit.touched})
    edit.provenance.update(
        unmerge=VERSION,
        torch=torch.__version__,
        python=platform.python_version(),
        device=str(device_of(model)),
        samples=_samples(request),
        classes=list(request.classes),
        seconds={phase: round(seconds, 4) for phase, seconds in clock.seconds.items()},
        notes=notes,
    )
    return edit


def _samples(request: Request) -> dict[str, int]:
    parts = {"forget": request.forget, "retain": request.retain, "all": request.whole}
    return {name: part.samples for name, part in parts.items() if part is not None}


class Clock:
    """Seconds a phase."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[phase] += time.perf_counter() - start
