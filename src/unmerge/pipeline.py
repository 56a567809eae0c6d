"""fit(): Algorithm 1, from two data sets and a checkpoint to an edit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unmerge import initial
from unmerge.batches import Forward, Mask, device_of
from unmerge.directions import Directions, coefficients_of, directions
from unmerge.edit import Edit, LayerEdit
from unmerge.errors import DataError, LayerError, RecipeError, warn
from unmerge.initial import Init
from unmerge.layers import is_transposed, tensor_name, weight_matrix
from unmerge.ledger import as_collected
from unmerge.moments import full_precision
from unmerge.origin import check_origin
from unmerge.provenance import finished_edit
from unmerge.recipe import Recipe
from unmerge.request import Request, Source, request_of
from unmerge.statistics import Statistics
from unmerge.verdict import Verdict, judge


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
    on_verdict: str = "warn",
    check_init: bool = True,
) -> Edit:
    """The edit that makes `model` forget `forget` and keep `retain`; the model itself is not changed.

    forget, retain: batches (a DataLoader, a list) or their `Statistics`. In their place `classes` and the
    `statistics` of everything, for whole classes. Statistics from before edits that the model carries stay in use:
    the new edit is fitted on the weights from before and adds to the others.
    init: the weights before fine-tuning, "zero" when trained from scratch; a stranger's are refused unless
    check_init=False. mask, forward: as for `collect`.
    on_verdict: whether to "warn", "raise" or "ignore" when samples that are not whole classes have nothing in common.
    """
    recipe = recipe or Recipe()
    if on_verdict not in ("warn", "raise", "ignore"):
        raise RecipeError(f"on_verdict={on_verdict!r} is not 'warn', 'raise' or 'ignore'.")
    clock = Clock(device_of(model))
    given = next((part.weights for part in (statistics, retain, forget) if isinstance(part, Statistics)), None)
    with as_collected(model, given) as edits_set_aside:
        with clock("statistics"):
            request = request_of(model, forget, retain, recipe, classes, statistics, mask, forward)
        asked, recipe = recipe, request.settled(recipe)
        names = request.layers(model, recipe)
        task_vectors = initial.task_vectors(model, init, names, with_biases=recipe.bias == "shrink")
        if check_init and init != "zero":
            check_origin(dict(model.named_parameters(remove_duplicate=False)), task_vectors)
        verdict = None
        if on_verdict != "ignore" and not request.classes:
            with clock("verdict"):
                verdict = judge(model, request, names, retain, recipe.seed, mask, forward)
            _heed(verdict, on_verdict)
        layers = _layer_edits(model, names, task_vectors, request, recipe, clock)
    if not layers:
        raise LayerError("the retain class means span the whole input of every layer. Use basis='lda'.")
    return finished_edit(model, layers, names, request, recipe, init, clock.seconds, verdict, edits_set_aside, asked)


def _layer_edits(
    model: nn.Module,
    names: list[str],
    task_vectors: dict[str, Tensor],
    request: Request,
    recipe: Recipe,
    clock: Clock,
) -> dict[str, LayerEdit]:
    """Bases and coefficients, layer by layer; layers that share their input share their bases."""
    layers: dict[str, LayerEdit] = {}
    known: dict[tuple[int, ...], Directions] = {}
    with full_precision(), torch.no_grad():
        for name in names:
            module = model.get_submodule(name)
            weight = task_vectors[tensor_name(name, "weight")]
            with clock("bases"):
                source = request.sources(name)
                if source not in known:
                    known[source] = directions(request.pools(name), recipe)
                basis = known[source].to(weight.device)
                if basis.rank == 0:
                    _check_empty(name, recipe)
                    continue
            with clock("solve"):
                task_vector = weight_matrix(module, weight).double()
                coefficients = coefficients_of(task_vector, basis, recipe)
                bias = task_vectors.get(tensor_name(name, "bias"))
                layers[name] = _layer_edit(name, module, coefficients, basis.forget, bias, request, recipe)
    return layers


def _heed(verdict: Verdict, on_verdict: str) -> None:
    if verdict.kind != "instance-like":
        return
    message = f"the request looks {verdict}"
    if on_verdict == "raise":
        raise DataError(f"{message} Pass on_verdict='ignore' to edit all the same.")
    warn(f"{message} unmerge.diagnose shows more; on_verdict='raise' refuses such requests.")


def _layer_edit(
    name: str,
    module: nn.Module,
    coefficients: Tensor,
    forget_basis: Tensor,
    bias: Tensor | None,
    request: Request,
    recipe: Recipe,
) -> LayerEdit:
    """B, Q and the constant part of one layer, in the precision of its weight."""
    if forget_basis.dim() == 3:
        # A group with fewer directions has zero columns; QR completes them, and their coefficients stay zero.
        forget_basis, upper = torch.linalg.qr(forget_basis)
        coefficients = coefficients @ upper.mT
    shift = torch.zeros(coefficients.shape[:-1].numel(), dtype=torch.float64, device=coefficients.device)
    shift_to = request.statistics.shift_to[name]
    if recipe.mean != "free" and shift_to is not None:
        # The edit acts on x − m_R: its constant part B Qᵀ m_R stays in the output.
        mean = request.retain_mean(name).to(coefficients.device)
        shift += (coefficients @ (forget_basis.mT @ mean.unsqueeze(-1))).flatten()
    elif recipe.mean == "preserve":
        raise LayerError(
            f"mean='preserve': layer {name!r} has no bias, and no BatchNorm is the only reader of its output, so "
            "nothing can take the constant. Leave it out with layers=..., or use mean='auto'."
        )
    if bias is not None:
        shift -= recipe.gamma / (1 + recipe.gamma) * bias.double()  # implementation note (iv)
        shift_to = tensor_name(name, "bias")
    kept = torch.promote_types(module.get_parameter("weight").dtype, torch.float32)
    has_shift = shift_to is not None and bool(shift.any())
    return LayerEdit(
        B=coefficients.to(kept),
        Q=forget_basis.to(kept),
        shift=shift.to(kept) if has_shift else None,
        shift_to=shift_to if has_shift else None,
        transposed=is_transposed(module),
    )


def _check_empty(name: str, recipe: Recipe) -> None:
    """An empty basis is an error, but for private-mean, which leaves such a layer alone."""
    if recipe.basis == "private-mean":
        return
    if recipe.basis.startswith("cav") and recipe.centering == "separate":
        why = (
            "with centering='separate' each class or cluster is compared with the mean of the forget set, and a single "
            "one is that mean. Use centering='retain', or basis='lda'"
        )
    else:
        why = "the forget inputs do not differ from the retain inputs there. Leave it out with layers=..."
    raise LayerError(f"layer {name!r} has no forget direction: {why}.")


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
