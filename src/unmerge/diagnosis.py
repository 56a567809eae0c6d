"""diagnose(): whether a request can work, before anything is edited, from statistics alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge import bases, geometry
from unmerge.batches import Forward, Mask, check_rereadable
from unmerge.collection import collect
from unmerge.directions import coefficients_of, directions
from unmerge.eigen import top_eigenpairs
from unmerge.files import write_json
from unmerge.fingerprint import fingerprint, state_of
from unmerge.initial import Init, task_vectors
from unmerge.layers import layer_of, weight_matrix
from unmerge.ledger import as_collected
from unmerge.moments import full_precision
from unmerge.origin import Origin, origin_of
from unmerge.pools import Pools
from unmerge.recipe import Recipe
from unmerge.request import Request, needed_of, pair_of
from unmerge.separability import (
    RANK,
    Separability,
    control_request,
    mean_shift,
    random_control,
    rank_for,
    separability,
)
from unmerge.statistics import Statistics
from unmerge.tables import html_table, text_table
from unmerge.verdict import Verdict, verdict_of

_SPECTRUM = 32  # eigenvalues that are kept to be shown
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class LayerDiagnosis:
    """What the statistics say of one layer; lists have an entry a direction, averages run over groups."""

    features: int
    edited: bool  # whether the recipe edits it
    task_vector_norm: float
    weight_norm: float
    separability: Separability  # with PCA at rank 16
    overlaps: list[float]  # of the recipe's own forget directions with the retain span
    captured: float  # share of the forget variance that they hold
    cosines: list[float]  # of the principal angles between the spans
    gains: list[float]  # what the exact solver keeps along each (Corollary 1); none for closed forms without a solver
    forget_rank: float  # effective ranks
    retain_rank: float
    forget_spectrum: list[float]  # leading eigenvalues as shares of the variance
    retain_spectrum: list[float]
    tail_energy: float  # N_F Σν beyond rank 16 (Lemma 1), as a share of N_F Σν
    forget_response: float  # E‖τ_R x‖² over forget inputs at alpha, exactly, and its bound (Proposition 1)
    forget_bound: float
    retain_response: float  # E‖ατ_F x‖² over retain inputs
    retain_bound: float
    mean_shift: float  # ‖m_F − m_R‖² as a share of the retain variance
    origin: Origin | None  # how the weights lie to the initial ones; None for init="zero"

    @property
    def overlap(self) -> float:
        return sum(self.overlaps) / len(self.overlaps) if self.overlaps else 0.0

    @property
    def overlap_spread(self) -> float:
        return float(torch.tensor(self.overlaps).std(correction=0)) if self.overlaps else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """The layers, the request's separability beside a random subset's, and the verdict in plain words."""

    layers: dict[str, LayerDiagnosis]
    verdict: Verdict
    alpha: float
    basis: str
    samples: dict[str, int]

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{text_table(self._columns(), self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p><b>{self.verdict.kind}</b>. {self.verdict.sentence}</p>" + html_table(self._columns(), self._rows())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as JSON text, also written to a file where a path is given."""
        if path is not None:
            write_json(Path(path), self.to_dict())
        return json.dumps(self.to_dict(), indent=2)

    def _columns(self) -> list[str]:
        return ["layer", "edited", "|τ|", "S", "fvar", "overlap", f"{self.basis}: overlap", "fvar", "gain", "shift"]

    def _rows(self) -> list[list[str]]:
        return [
            [
                name or "(model)",
                "yes" if layer.edited else "",
                f"{layer.task_vector_norm:.2f}",
                f"{layer.separability.score:.3f}",
                f"{layer.separability.captured:.2f}",
                f"{layer.separability.overlap:.2f}",
                f"{layer.overlap:.2f} ± {layer.overlap_spread:.2f}",
                f"{layer.captured:.2f}",
                f"{min(layer.gains):.2f}-{max(layer.gains):.2f}" if layer.gains else "",
                f"{layer.mean_shift:.3f}",
            ]
            for name, layer in self.layers.items()
        ]


def diagnose(
    forget: Iterable[Any] | Statistics,
    retain: Iterable[Any] | Statistics,
    model: nn.Module,
    init: Init = "zero",
    *,
    recipe: Recipe | None = None,
    control: Statistics | None = None,
    alpha: float | None = None,
    mask: Mask = None,
    forward: Forward | None = None,
) -> Diagnosis:
    """What the geometry of a request says of its chances; the model is not changed.

    forget, retain: batches, of which every editable layer is read, or their `Statistics`, with no further pass.
    control: the statistics of a random subset of the same size; drawn from retain where that is data.
    alpha: the strength for which the bounds are given; by default the recipe's, or 1.
    """
    given = next((part.weights for part in (retain, forget) if isinstance(part, Statistics)), None)
    with as_collected(model, given):
        return _diagnose(forget, retain, model, init, recipe or Recipe(), control, alpha, mask, forward)


def _diagnose(
    forget: Iterable[Any] | Statistics,
    retain: Iterable[Any] | Statistics,
    model: nn.Module,
    init: Init,
    recipe: Recipe,
    control: Statistics | None,
    alpha: float | None,
    mask: Mask,
    forward: Forward | None,
) -> Diagnosis:
    options: dict[str, Any] = {"mask": mask, "forward": forward, "seed": recipe.seed}
    retain_data = None if isinstance(retain, Statistics) else retain
    if not isinstance(forget, Statistics):
        layers = retain if isinstance(retain, Statistics) else recipe.layers
        forget = collect(model, forget, layers, **needed_of(recipe), **options, what="forget")
    if not isinstance(retain, Statistics):
        if control is None:
            check_rereadable(retain, "retain", "the random control")
        retain = collect(model, retain, forget, **options, what="retain")
    request = pair_of(forget, retain, recipe)
    recipe = request.settled(recipe)
    forget.check_weights(fingerprint(state_of(model)))
    if control is None and retain_data is not None and retain.samples > 1:
        control = random_control(model, retain_data, request, options)
    edited = request.layers(model, recipe)
    names = list(forget.layers)
    vectors = task_vectors(model, init, names)
    strength = next(value for value in (alpha, recipe.alpha, 1.0) if value is not None)
    others = None if control is None else control_request(request, control)
    with full_precision(), torch.no_grad():
        found = {
            name: _layer(request, name, model, vectors.of(name), recipe, strength, name in edited) for name in names
        }
        reached = [] if others is None else [name for name in edited if name in others.statistics.layers]
        random = {name: separability(others.pools(name)) for name in reached} if others is not None else None
    verdict = verdict_of(
        {name: found[name].separability for name in edited},
        random,
        {name: found[name].mean_shift for name in edited},
        forget.samples,
    )
    samples = {"forget": forget.samples, "retain": retain.samples}
    return Diagnosis(found, verdict, strength, recipe.basis, samples)


def _layer(
    request: Request, name: str, model: nn.Module, difference: Tensor, recipe: Recipe, alpha: float, edited: bool
) -> LayerDiagnosis:
    module = layer_of(model, name)
    groups = request.pools(name)
    vector = weight_matrix(module, difference).double()
    weight = weight_matrix(module).detach().to(vector)
    found = directions(groups, recipe).to(vector.device)
    coefficients = coefficients_of(vector, found, recipe)
    # One entry a group; a layer without groups is one.
    matrices = (vector, coefficients, found.forget, found.retain)
    per_group = zip(*(matrix.reshape(len(groups), *matrix.shape[-2:]) for matrix in matrices), strict=True)
    parts = [_group(pools, tensors, recipe, alpha) for pools, tensors in zip(groups, per_group, strict=True)]
    numbers = [key for key in parts[0] if key not in _LISTS]
    means: dict[str, Any] = {key: sum(part[key] for part in parts) / len(parts) for key in numbers}
    # The directions of all groups stand together; the spectra are those of the first.
    directed = ("overlaps", "cosines", "gains")
    lists: dict[str, Any] = {key: [value for part in parts for value in part[key]] for key in directed}
    initial = weight - vector
    input_basis = bases.pca(groups[0].joint.scatter, 4 * RANK) if len(groups) == 1 else None
    return LayerDiagnosis(
        features=len(groups[0].retain_mean),
        edited=edited,
        task_vector_norm=vector.norm().item(),
        weight_norm=weight.norm().item(),
        separability=separability(groups),
        mean_shift=mean_shift(groups),
        origin=origin_of(weight, initial, input_basis) if initial.any() else None,
        forget_spectrum=parts[0]["forget_spectrum"],
        retain_spectrum=parts[0]["retain_spectrum"],
        **lists,
        **means,
    )


_LISTS = ("overlaps", "cosines", "gains", "forget_spectrum", "retain_spectrum")


def _group(pools: Pools, matrices: Sequence[Tensor], recipe: Recipe, alpha: float) -> dict[str, Any]:
    vector, coefficients, basis, kept = (matrix.to(pools.retain_mean.device) for matrix in matrices)
    forget_scatter, retain_scatter = pools.forget.scatter, pools.retain_scatter
    # Second moments of the inputs as they are, as in Lemma 1 and Proposition 1.
    zero = torch.zeros_like(pools.retain_mean)
    forget_moment, retain_moment = (
        (moments.scatter_about(zero) / moments.n).double() for moments in (pools.forget, pools.retain)
    )
    # A group with fewer directions than others has zero columns.
    basis, kept = (columns[:, columns.any(0)] for columns in (basis, kept))
    solved = kept.shape[1] > 0
    if not solved:  # closed forms protect no retain directions, but overlap with them all the same
        kept = bases.pca(retain_scatter, recipe.retain_rank, pools.joint_basis(recipe.retain_rank))
    coefficients = coefficients[:, : basis.shape[1]]
    angles = geometry.cosines(basis, kept)
    edit = coefficients @ basis.mT
    rest = vector - alpha * edit
    leading = top_eigenpairs(forget_moment, rank_for(len(zero)))[0].sum()
    return {
        "overlaps": geometry.overlaps(basis, kept).tolist(),
        "cosines": angles.tolist(),
        "gains": geometry.gains(angles, recipe.lam, recipe.gamma).tolist() if solved else [],
        "captured": geometry.captured_share(forget_scatter, basis).item(),
        "forget_rank": geometry.effective_rank(forget_scatter).item(),
        "retain_rank": geometry.effective_rank(retain_scatter).item(),
        "forget_spectrum": _spectrum(forget_scatter),
        "retain_spectrum": _spectrum(retain_scatter),
        "tail_energy": (1 - leading / forget_moment.diagonal().sum().clamp_min(_TINY)).item(),
        "forget_response": geometry.response(rest, forget_moment).item(),
        "forget_bound": geometry.response_bound(rest, forget_moment, basis).item(),
        "retain_response": alpha**2 * geometry.response(edit, retain_moment).item(),
        "retain_bound": alpha**2 * geometry.response_bound(edit, retain_moment, kept).item(),
    }


def _spectrum(scatter: Tensor) -> list[float]:
    values = top_eigenpairs(scatter, _SPECTRUM)[0]
    return (values / scatter.double().diagonal().sum().clamp_min(_TINY)).tolist()
