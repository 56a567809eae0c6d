"""Kodge et al. (2024): project what is the forget set's own out of every layer's input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.options import BaselineError, check_count, check_number
from unmerge.baselines.samples import Data, Samples, gather
from unmerge.baselines.selection import Candidate, Judge, Weights
from unmerge.baselines.training import check_finite
from unmerge.collecting.collection import collect
from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import Forward
from unmerge.errors import DataError
from unmerge.model.layers import device_of_layer, from_matrix, is_transposed, tensor_name, weight_matrix
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint
from unmerge.sums.moments import Moments

RETAIN_SCALES = (100.0, 300.0, 1000.0, 3000.0)
FORGET_SCALES = (3.0, 10.0, 30.0, 100.0)


def kodge(
    model: nn.Module,
    forget: Data,
    retain: Data,
    *,
    retain_scales: Sequence[float] = RETAIN_SCALES,
    forget_scales: Sequence[float] = FORGET_SCALES,
    samples: int | None = 5000,
    statistics: tuple[Statistics, Statistics] | None = None,
    batch_size: int = 128,
    autocast: bool = False,
    trace: list[Candidate] | None = None,
    forward: Forward | None = None,
    seed: int = 0,
) -> nn.Module:
    """A copy of the model with W Pᵀ in every layer, P = I − (M_F − M_F M_R); biases stay.

    M = U Λ Uᵀ from the uncentred second moment of the layer's input, Λ = a r / ((a − 1) r + 1) with r each
    eigenvalue's share. The scales (a_R, a_F) are the best of the grid on training data. Every layer's eigenproblem is
    solved once, in float64, which for a layer of 4,608 inputs takes 0.15 s on an H200 and 15 s on two CPU cores.

    samples: so many of each pool, drawn at random, are read and measured on; None: all.
    statistics: what `collect` made of forget and retain, to share it; the data then only serve to choose the scales,
        and layers that were not collected stay as they are.
    trace: a list to which every pair of scales that was tried is added with its accuracies.
    """
    for name, scales in (("retain_scales", retain_scales), ("forget_scales", forget_scales)):
        if isinstance(scales, str) or not isinstance(scales, Sequence) or not scales:
            raise BaselineError(f"{name}={scales!r} is not a list of scales, for example [100, 300].")
        for scale in scales:
            check_number(name, scale, 0, above=True)
    check_count("batch_size", batch_size, 1)
    with working_copy(model, seed) as result:
        held = gather(result, forget, retain, forward=forward, forget_limit=samples, retain_limit=samples, seed=seed)
        pools = _collected(result, held, batch_size, forward) if statistics is None else _shared(result, statistics)
        candidates = projections(result, *pools, retain_scales, forget_scales)
        judge = Judge(held, batch_size, forward, autocast)
        judge.choose(result, candidates, len(retain_scales) * len(forget_scales), "Kodge et al.", trace)
        check_finite(result, "Kodge et al.")
        return result


def projections(
    model: nn.Module,
    forget: Statistics,
    retain: Statistics,
    retain_scales: Sequence[float],
    forget_scales: Sequence[float],
) -> Iterator[tuple[dict[str, float], Weights]]:
    """The projected weights for every pair of scales."""
    modules = {name: model.get_submodule(name) for name in forget.layers}
    # Copies: the caller writes each result into the model before it asks for the next.
    originals = {name: module.get_parameter("weight").detach().clone() for name, module in modules.items()}
    matrices = {name: weight_matrix(module, originals[name]).double() for name, module in modules.items()}
    # Layers that share their input share its eigenvectors.
    solved: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in (*forget.layers.values(), *retain.layers.values()):
        if id(layer) not in solved:
            solved[id(layer)] = spectrum(layer.moments)

    for retain_scale in retain_scales:
        # W Pᵀ = W − W (I − M_R) M_F: products with W as they come, instead of three matrices as wide as the input.
        own = {}
        for name, matrix in matrices.items():
            shares, vectors = solved[id(retain[name])]
            shared = (matrix @ vectors * importance(shares, retain_scale).unsqueeze(-2)) @ vectors.mT
            own[name] = (matrix - shared) @ solved[id(forget[name])][1]
        for forget_scale in forget_scales:
            weights = {}
            for name, matrix in matrices.items():
                shares, vectors = solved[id(forget[name])]
                projected = matrix - (own[name] * importance(shares, forget_scale).unsqueeze(-2)) @ vectors.mT
                like = originals[name]
                weights[tensor_name(name, "weight")] = from_matrix(projected, like, is_transposed(modules[name])).to(
                    like.dtype
                )
            yield {"retain_scale": retain_scale, "forget_scale": forget_scale}, weights


def spectrum(moments: Moments) -> tuple[Tensor, Tensor]:
    """Each eigenvalue's share of Σxxᵀ, and the eigenvectors, in float64; one of each a group."""
    second = moments.scatter_about(torch.zeros_like(moments.mean)).double()
    values, vectors = torch.linalg.eigh((second + second.mT) / 2)
    values = values.clamp(min=0)
    # A group whose inputs are all zero has nothing to project.
    return values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny), vectors


def importance(shares: Tensor, scale: float) -> Tensor:
    """Λ: near 1 for directions with a large share, the share times the scale for small ones."""
    return scale * shares / ((scale - 1) * shares + 1)


def _collected(
    model: nn.Module, samples: Samples, batch_size: int, forward: Forward | None
) -> tuple[Statistics, Statistics]:
    forget, retain = (
        [samples.take(chosen)[0] for chosen in samples.batches(places, batch_size)]
        for places in (samples.forget, samples.retain)
    )
    forgotten = collect(model, forget, forward=forward, what="forget")
    return forgotten, collect(model, retain, forgotten, forward=forward, what="retain")


def _shared(model: nn.Module, statistics: tuple[Statistics, Statistics]) -> tuple[Statistics, Statistics]:
    if not isinstance(statistics, (tuple, list)) or [type(part) for part in statistics] != [Statistics, Statistics]:
        raise DataError("statistics= is not a pair of Statistics: pass (those of forget, those of retain).")
    forget, retain = statistics
    forget.check_alike(retain, "pair")
    forget.check_weights(fingerprint(state_of(model)))
    devices = {name: device_of_layer(model, name) for name in forget.layers}
    return forget.at(devices), retain.at(devices)
