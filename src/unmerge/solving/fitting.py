"""Layer by layer from a request to an edit: bases, coefficients, and the constant that keeps the mean."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unmerge.editing.layer_edit import LayerEdit
from unmerge.errors import LayerError
from unmerge.linalg.products import full_precision
from unmerge.model.layers import beyond_lora, is_transposed, layer_of, tensor_name, weight_matrix
from unmerge.recipe import Recipe
from unmerge.requests.request import Request
from unmerge.solving.directions import Directions, coefficients_of, directions, fall, head_directions, without_response
from unmerge.solving.pooling import pools_as_counted, pools_of, retain_mean
from unmerge.solving.settling import Settled


@dataclass
class Fitted:
    """The edits of the layers so far, and what there is to tell of them."""

    layers: dict[str, LayerEdit] = field(default_factory=dict)
    sketches: dict[str, Mapping[str, float]] = field(default_factory=dict)  # `Directions.sketch` of each such layer
    keeps_rows: bool = False  # whether the classifier has `head_directions`: no row need go


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


def fit_layers(fitted: Fitted, model: nn.Module, request: Request, settled: Settled, clock: Clock) -> None:
    """Add the bases and coefficients of a part's layers; those that share their input share their bases."""
    recipe, task_vectors, names, head = settled.recipe, settled.task_vectors, settled.of(request), settled.head
    known: dict[tuple[int, ...], Directions] = {}

    def falls(name: str) -> bool:
        return head.falls and name == head.name

    def source_of(name: str) -> tuple[int, ...]:
        is_centred = recipe.traits.asks_mean and request.keeps_mean(name, recipe)
        return (falls(name), is_centred, *request.input_key(name))

    last = {source_of(name): name for name in names}
    with full_precision(), torch.no_grad():
        for name in names:
            module = layer_of(model, name)
            weight = task_vectors.of(name)
            with clock("bases"):
                source = source_of(name)
                if source not in known:
                    find = head_directions if falls(name) else directions
                    known[source] = find(pools_of(request, name), recipe)
                basis = known[source].to(weight.device)
                if last[source] == name:  # of many directions they are as large as the statistics
                    del known[source]
                fitted.keeps_rows |= basis.keeps_rows
                if basis.sketch is not None:
                    fitted.sketches[name] = basis.sketch
                if basis.rank == 0:
                    _check_empty(name, recipe)
                    if head.removed and name == head.name:  # whose rows go all the same
                        fitted.layers[name] = _no_change(module, weight)
                    continue
            with clock("solve"):
                task_vector = weight_matrix(module, weight).double()
                coefficients = settled.doses.applied(name, basis, coefficients_of(task_vector, basis, recipe))
                bias = task_vectors.get(tensor_name(name, "bias"))
                lower: Tensor | None = None
                if basis.keeps_rows:
                    shifts = pools_as_counted(request, name)[0].shifts()
                    own = weight_matrix(module).to(task_vector)
                    lower = recipe.head_strength * fall(own, *shifts, request.classes)
                fitted.layers[name] = _layer_edit(
                    name, module, coefficients, basis.forget, bias, lower, request, recipe
                )


def _no_change(module: nn.Module, weight: Tensor) -> LayerEdit:
    """An edit of rank 0."""
    matrix = weight_matrix(module, weight)
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    B, Q = matrix[..., :0].contiguous(), matrix.mT[..., :0].contiguous()
    return LayerEdit(B, Q, transposed=is_transposed(module), beyond_lora=beyond_lora(module))


def _layer_edit(
    name: str,
    module: nn.Module,
    coefficients: Tensor,
    forget_basis: Tensor,
    bias: Tensor | None,
    lower: Tensor | None,
    request: Request,
    recipe: Recipe,
) -> LayerEdit:
    """B, Q and the constant part of one layer, in the precision of its weight; lower: taken off its outputs."""
    if forget_basis.dim() == 3:
        # A group with fewer directions has zero columns; QR completes them, and their coefficients stay zero.
        forget_basis, upper = torch.linalg.qr(forget_basis)
        coefficients = coefficients @ upper.mT
    shift = torch.zeros(coefficients.shape[:-1].numel(), dtype=torch.float64, device=coefficients.device)
    shift_to = request.statistics.shift_to[name]
    if request.keeps_mean(name, recipe):
        mean = retain_mean(request, name).to(coefficients.device)
        if recipe.mean == "orthogonal":
            coefficients, forget_basis = without_response(mean, coefficients, forget_basis)
            if not coefficients.any():
                raise LayerError(
                    f"layer {name!r} has no forget direction beside its mean input. Leave it out with layers=..., or "
                    "use mean='auto'."
                )
        else:
            # The edit acts on x − m_R: its constant part B Qᵀ m_R stays in the output.
            shift += (coefficients @ (forget_basis.mT @ mean.unsqueeze(-1))).flatten()
    elif recipe.mean == "preserve":
        raise LayerError(
            f"mean='preserve': layer {name!r} has no bias, and no BatchNorm is the only reader of its output, so "
            "nothing can take the constant. Use mean='orthogonal' or 'auto', or leave it out with layers=..."
        )
    if bias is not None:
        shift -= recipe.gamma / (1 + recipe.gamma) * bias.double()  # implementation note (iv)
        shift_to = tensor_name(name, "bias")
    if lower is not None:
        shift -= lower
    kept = torch.promote_types(module.get_parameter("weight").dtype, torch.float32)
    has_shift = shift_to is not None and bool(shift.any())
    return LayerEdit(
        B=coefficients.to(kept),
        Q=forget_basis.to(kept).contiguous(),
        shift=shift.to(kept) if has_shift else None,
        shift_to=shift_to if has_shift else None,
        transposed=is_transposed(module),
        beyond_lora=beyond_lora(module),
    )


def _check_empty(name: str, recipe: Recipe) -> None:
    """An empty basis is an error, but for one that leaves such a layer alone."""
    if recipe.traits.may_skip:
        return
    if recipe.traits.probes and recipe.centering == "separate":
        why = (
            "with centering='separate' each class or cluster is compared with the mean of the forget set, and a single "
            "one is that mean. Use centering='retain', or basis='lda'."
        )
    else:
        why = "the forget inputs do not differ from the retain inputs there. Leave it out with layers=..."
    raise LayerError(f"layer {name!r} has no forget direction: {why}")
