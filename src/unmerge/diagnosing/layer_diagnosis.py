"""What the statistics say of one layer: overlaps, captured variance, spectra and the bounds of Proposition 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.diagnosing import geometry
from unmerge.diagnosing.separability import RANK, Separability, mean_shift, rank_for, separability
from unmerge.linalg.eigen import top_eigenpairs
from unmerge.model.layers import layer_of, weight_matrix
from unmerge.model.origin import Origin, origin_of
from unmerge.recipe import Recipe
from unmerge.requests.request import Request
from unmerge.solving import bases
from unmerge.solving.directions import coefficients_of, directions, head_directions, without_response
from unmerge.solving.doses import Doses
from unmerge.solving.heads import Head
from unmerge.solving.pooling import pools_of
from unmerge.solving.pools import Pools

_SPECTRUM = 32  # eigenvalues that are kept to be shown
_LISTS = ("overlaps", "cosines", "gains", "forget_spectrum", "retain_spectrum")
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


def diagnose_layer(
    request: Request,
    name: str,
    model: nn.Module,
    difference: Tensor,
    recipe: Recipe,
    alpha: float,
    edited: bool,
    head: Head,
    doses: Doses,
) -> LayerDiagnosis:
    """What the recipe would find there; alpha: the strength for which responses and bounds are given."""
    module = layer_of(model, name)
    groups = pools_of(request, name)
    vector = weight_matrix(module, difference).double()
    weight = weight_matrix(module).detach().to(vector)
    found = (head_directions if head.falls and name == head.name else directions)(groups, recipe).to(vector.device)
    coefficients = doses.applied(name, found, coefficients_of(vector, found, recipe))
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
    if recipe.mean == "orthogonal":
        coefficients, basis = without_response(pools.retain_mean, coefficients, basis)
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
