"""The forget and retain directions of one layer, as the recipe asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmerge.linalg.orthonormal import NEGLIGIBLE, thin_qr
from unmerge.recipe import Recipe
from unmerge.solving import bases, solvers
from unmerge.solving.pools import Pools

_HEAVY = 1e6  # times the variance of all inputs
_BLENDED = 1.32  # times the mean of two edits, which alone leaves more apart than retraining does (docs/findings.md)


@dataclass(frozen=True)
class Directions:
    """Q_F and Q_R of a layer, stacked over its groups; a group with fewer directions has zero columns at the end."""

    forget: Tensor  # (in, k), or (groups, in, k)
    retain: Tensor
    lift: Tensor | None = None  # the coefficients are τ · lift instead of a solver's
    keeps_rows: bool = False  # whether they are a classifier's that forgets without the removal of rows
    sketch: Mapping[str, float] | None = None  # of a sketched layer: its size, and the shares of variance that it holds

    @property
    def rank(self) -> int:
        return self.forget.shape[-1]

    def to(self, device: torch.device) -> Directions:
        if self.forget.device == device:
            return self
        lift = None if self.lift is None else self.lift.to(device)
        return replace(self, forget=self.forget.to(device), retain=self.retain.to(device), lift=lift)


def coefficients_of(task_vector: Tensor, found: Directions, recipe: Recipe) -> Tensor:
    """B of one layer, as the recipe's solver finds it."""
    if found.lift is not None:
        return task_vector @ found.lift
    overlap = found.forget.mT @ found.retain
    projection = task_vector @ found.forget
    if recipe.solver == "budgeted":
        return solvers.budgeted(projection, overlap, recipe.lam, recipe.gamma, recipe.steps, recipe.lr)
    if recipe.solver == "soft-threshold":
        return solvers.soft_threshold(projection, overlap, recipe.lam, recipe.gamma, recipe.delta)
    return solvers.exact(projection, overlap, recipe.lam, recipe.gamma)


def directions(groups: Sequence[Pools], recipe: Recipe) -> Directions:
    """The directions of every group of a layer."""
    found = [_group_directions(pools, recipe) for pools in groups]
    if len(found) == 1:
        return found[0]
    lifts = [group.lift for group in found if group.lift is not None]
    return Directions(
        _stacked([group.forget for group in found]),
        _stacked([group.retain for group in found]),
        _stacked(lifts) if lifts else None,
    )


def head_directions(groups: Sequence[Pools], recipe: Recipe) -> Directions:
    """The directions of a classifier that keeps its rows while `blend` moves the features before it.

    private-mean, with which the retained means keep their outputs; `fall` then takes the forgotten outputs below the
    others. Where the retained means span the whole input it is edited like any layer.
    """
    found = directions(groups, recipe.but(basis="private-mean"))
    if found.rank == 0:
        return directions(groups, recipe)
    return replace(found, keeps_rows=True)


def fall(weight: Tensor, rows: Tensor, shifts: Tensor, classes: Sequence[int]) -> Tensor:
    """What the mean of each forgotten class gives its own output, (outputs,), 0 for the others: so far it is to fall.

    The outputs of classes that a network never saw are low whatever its input. rows, shifts: `Pools.shifts`.
    """
    places = torch.tensor(list(classes), device=weight.device)
    given = (weight[places] * shifts.to(weight)).sum(1).clamp_min(0) * (rows > 0).to(weight)
    return weight.new_zeros(len(weight)).index_copy(0, places, given)


def _group_directions(pools: Pools, recipe: Recipe) -> Directions:
    where = pools.coordinates
    if where is None:
        return _own_directions(pools, recipe)
    found = _own_directions(pools, recipe.but(ridge=where.ridge(recipe.ridge)))
    lift = None if found.lift is None else where.lifted(found.lift)
    return Directions(where.lifted(found.forget), where.lifted(found.retain), lift, sketch=where.facts)


def _own_directions(pools: Pools, recipe: Recipe) -> Directions:
    if pools.is_constant:
        nothing = pools.retain_mean.new_zeros(len(pools.retain_mean), 0)
        return Directions(nothing, nothing, nothing if recipe.traits.closed else None)
    if recipe.basis in ("private-mean", "blend"):
        return _of_means(pools, recipe)
    if recipe.basis == "wiener":
        return _filtered(pools, recipe)
    start = pools.joint_basis(recipe.retain_rank)
    return Directions(_forget_basis(pools, recipe), bases.pca(pools.retain_scatter, recipe.retain_rank, start))


def _of_means(pools: Pools, recipe: Recipe) -> Directions:
    """private-mean: the edit τ L D Dᵀ L⁻¹, D being what the forgotten means have outside the retained ones, whitened.

    With the mean preserved every retained class mean keeps its response; empty where they span the whole input. blend:
    the mean of that edit and the projection on the lda directions, since where one overdoes the other underdoes,
    `_BLENDED` times over; both take the ridge of the within-class scatter. Neither needs a solver.
    """
    means, lost, kept = pools.whitened_means(recipe.ridge)
    shifts = means.shifts(lost)
    private = means.private(shifts, lost, kept)
    probes = means.lda(shifts) if recipe.basis == "blend" else private[:, :0]
    basis, upper = thin_qr(torch.cat([probes, means.turn @ private], dim=1))
    share = _BLENDED / 2 if probes.shape[1] and private.shape[1] else 1.0
    of_probes, of_private = (share * upper).split([probes.shape[1], private.shape[1]], dim=1)
    directions = torch.cat([basis, probes @ of_probes.mT], dim=1)
    answers = torch.cat([torch.zeros_like(basis), private @ of_private.mT], dim=1)
    found, lift = means.mapped(directions, answers).tensor_split(2, dim=1)
    return Directions(found, found[:, :0], lift)


def _filtered(pools: Pools, recipe: Recipe) -> Directions:
    """wiener: moments about m_R where the edit acts on x − m_R, else about 0, so that the mean counts as well."""
    mean, rows = pools.retain_mean, pools.retain_rows
    centre = mean if pools.keeps_mean(recipe) else torch.zeros_like(mean)
    column = (mean - centre) * rows**0.5
    if recipe.mean == "orthogonal":  # so heavy that the best edit has next to no response to it
        weight = (_HEAVY * pools.retain.variance.sum() * rows).sqrt()
        column = weight * mean / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny)
    factor = bases.ridged_factor(pools.retain_scatter, recipe.ridge, column)
    lam = recipe.lam * pools.forget.n / rows  # since these are sums, not means
    basis, lift = bases.wiener(pools.forget.about(centre), factor, recipe.rank, lam, pools.noise)
    return Directions(basis, basis[:, :0], lift)


def without_response(mean: Tensor, coefficients: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """B and Q of the edit B Qᵀ (I − m̂ m̂ᵀ), which does not answer to the mean.

    A direction of which nothing is left goes; where there are groups its coefficients are zero.
    """
    unit = mean / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    unit = unit.unsqueeze(-1)
    found, upper = torch.linalg.qr(basis - unit @ (unit.mT @ basis))
    left = upper.norm(dim=-1) > NEGLIGIBLE
    if basis.dim() == 2:
        return coefficients @ upper[left].mT, found[:, left]
    return coefficients @ (upper * left.unsqueeze(-1)).mT, found


def _forget_basis(pools: Pools, recipe: Recipe) -> Tensor:
    if recipe.basis == "lda":
        return bases.lda(pools.joint_factor(recipe.ridge), pools.class_shifts)
    if recipe.basis == "pca":
        return bases.pca(pools.forget.scatter, recipe.rank)
    if recipe.basis == "deflated-pca":
        deflated = bases.pca(pools.retain_scatter, recipe.deflate)
        if recipe.deflate >= pools.width:
            # All of a narrow input would go; the weakest directions stay, as many as are asked for.
            deflated = deflated[:, : max(0, deflated.shape[1] - recipe.rank)]
        return bases.deflated_pca(pools.forget.scatter, deflated, recipe.rank)
    if recipe.basis == "contrastive":
        factor = bases.ridged_factor(pools.retain_scatter, recipe.ridge)
        return bases.contrastive(pools.forget.about(pools.retain_mean), factor, recipe.rank, pools.noise)
    scatters, shifts, retain_scatter = pools.clusters(recipe)
    return bases.cav(scatters, retain_scatter, shifts, recipe.ridge)


def _stacked(matrices: list[Tensor]) -> Tensor:
    width = max(matrix.shape[-1] for matrix in matrices)
    return torch.stack([torch.nn.functional.pad(matrix, (0, width - matrix.shape[-1])) for matrix in matrices])
