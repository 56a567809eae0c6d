"""The forget and retain directions of one layer, as the recipe asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmerge import bases, solvers
from unmerge.orthonormal import thin_qr
from unmerge.pools import Pools
from unmerge.recipe import Recipe


@dataclass(frozen=True)
class Directions:
    """Q_F and Q_R of a layer, stacked over its groups; a group with fewer directions has zero columns at the end."""

    forget: Tensor  # (in, k), or (groups, in, k)
    retain: Tensor
    lift: Tensor | None = None  # the coefficients are τ · lift instead of a solver's

    @property
    def rank(self) -> int:
        return self.forget.shape[-1]

    def to(self, device: torch.device) -> Directions:
        lift = None if self.lift is None else self.lift.to(device)
        return Directions(self.forget.to(device), self.retain.to(device), lift)


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


def _group_directions(pools: Pools, recipe: Recipe) -> Directions:
    if pools.is_constant:
        nothing = pools.retain_mean.new_zeros(len(pools.retain_mean), 0)
        return Directions(nothing, nothing, nothing if recipe.basis in ("blend", "private-mean") else None)
    if recipe.basis == "private-mean":
        return _private(pools, pools.within_factor(recipe.ridge))
    if recipe.basis == "blend":
        return _blended(pools, recipe)
    start = pools.joint_basis(recipe.retain_rank)
    return Directions(_forget_basis(pools, recipe), bases.pca(pools.retain_scatter, recipe.retain_rank, start))


def _private(pools: Pools, factor: Tensor) -> Directions:
    basis, lift = bases.private_mean(factor, pools.class_shifts, pools.retain_class_shifts)
    return Directions(basis, basis[:, :0], lift)


def _blended(pools: Pools, recipe: Recipe) -> Directions:
    """The mean of two edits, the projection on the lda directions and private-mean: where one overdoes, one underdoes.

    Both take the ridge of the within-class scatter, so that one factorisation serves them; neither needs a solver.
    """
    factor = pools.within_factor(recipe.ridge)
    probes = bases.lda_within(factor, pools.class_shifts, pools.between)
    private = _private(pools, factor)
    if private.lift is None or private.rank == 0:  # the retain means span this input
        return Directions(probes, probes[:, :0], probes)
    basis, upper = thin_qr(torch.cat([probes, private.forget], dim=1))
    return Directions(basis, basis[:, :0], torch.cat([probes, private.lift], dim=1) @ upper.mT / 2)


def _forget_basis(pools: Pools, recipe: Recipe) -> Tensor:
    if recipe.basis == "lda":
        return bases.lda(pools.joint_factor(recipe.ridge), pools.class_shifts)
    if recipe.basis == "pca":
        return bases.pca(pools.forget.scatter, recipe.rank)
    if recipe.basis == "deflated-pca":
        deflated = bases.pca(pools.retain_scatter, recipe.deflate)
        if recipe.deflate >= len(pools.retain_mean):
            # All of a narrow input would go; the weakest directions stay, as many as are asked for.
            deflated = deflated[:, : max(0, deflated.shape[1] - recipe.rank)]
        return bases.deflated_pca(pools.forget.scatter, deflated, recipe.rank)
    if recipe.basis == "contrastive":
        forget_scatter = pools.forget.scatter_about(pools.retain_mean) / pools.forget.n
        return bases.contrastive(forget_scatter, pools.retain_scatter / pools.retain_rows, recipe.rank, recipe.ridge)
    scatters, shifts, retain_scatter = pools.clusters(recipe)
    return bases.cav(scatters, retain_scatter, shifts, recipe.ridge)


def _stacked(matrices: list[Tensor]) -> Tensor:
    width = max(matrix.shape[-1] for matrix in matrices)
    return torch.stack([torch.nn.functional.pad(matrix, (0, width - matrix.shape[-1])) for matrix in matrices])
