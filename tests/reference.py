"""Algorithms 1-3 of the paper, word for word, slowly and in float64, with every layer input kept.

What the tests compare `unmerge` with; nothing is imported from it. A `recipe` is anything with the fields of
`unmerge.Recipe`. Matrices are (out, in); layers of a grouped convolution are lists with one entry a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-6  # the ε of Algorithm 3, relative to the length of the probe before it is orthogonalised


@dataclass(frozen=True)
class Inputs:
    """Every input row of one layer, one (rows, features) matrix a group, and the label of each row."""

    groups: list[Tensor]
    labels: Tensor | None

    def first(self, rows: int | None) -> Inputs:
        """The first rows alone."""
        labels = None if self.labels is None else self.labels[:rows]
        return Inputs([group[:rows] for group in self.groups], labels)


@dataclass(frozen=True)
class Layer:
    """One layer's edit: τ_F = B Q_Fᵀ, Q_F, Q_R and the retain mean, one entry a group."""

    forget_task: list[Tensor]
    forget_basis: list[Tensor]
    retain_basis: list[Tensor]
    retain_mean: list[Tensor]

    @property
    def constant(self) -> Tensor:
        """τ_F m_R, what an edit that acts on x − m_R leaves in the output."""
        return torch.cat([task @ mean for task, mean in zip(self.forget_task, self.retain_mean, strict=True)])


def layer_inputs(model: nn.Module, names: Sequence[str], inputs: Tensor, labels: Tensor | None) -> dict[str, Inputs]:
    """What each named layer receives while the model sees the samples one by one."""
    seen: dict[str, list[list[Tensor]]] = {name: [] for name in names}

    def hook(name: str) -> Any:
        return lambda module, args: seen[name].append(unfolded(module, args[0].detach().double()))

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    with torch.no_grad():
        for sample in inputs:
            model(sample.unsqueeze(0))
    for handle in handles:
        handle.remove()
    collected = {}
    for name, calls in seen.items():
        places = calls[0][0].shape[0]
        rows = [torch.cat(parts) for parts in zip(*calls, strict=True)]
        collected[name] = Inputs(rows, None if labels is None else labels.repeat_interleave(places))
    return collected


def unfolded(module: nn.Module, inputs: Tensor) -> list[Tensor]:
    """The rows that the module multiplies its weight with, one matrix a group."""
    if not isinstance(module, nn.Conv2d):
        return [inputs.reshape(-1, inputs.shape[-1])]
    padding = module.padding
    if padding == "valid":
        padding = (0, 0)
    if padding == "same":
        spare = [step * (size - 1) for step, size in zip(module.dilation, module.kernel_size, strict=True)]
        sides = [spare[1] // 2, spare[1] - spare[1] // 2, spare[0] // 2, spare[0] - spare[0] // 2]
    else:
        sides = [padding[1], padding[1], padding[0], padding[0]]
    mode = {"zeros": "constant"}.get(module.padding_mode, module.padding_mode)
    padded = functional.pad(inputs, sides, mode=mode)
    width = padded.shape[1] // module.groups
    return [
        functional.unfold(part, module.kernel_size, module.dilation, 0, module.stride).mT.flatten(0, 1)
        for part in padded.split(width, dim=1)
    ]


def matrices(module: nn.Module, weight: Tensor) -> list[Tensor]:
    """A weight as one (out, in) matrix a group, in float64."""
    weight = weight.detach().double()
    if isinstance(module, nn.Conv2d):
        return [part.flatten(1) for part in weight.chunk(module.groups)]
    return [weight if isinstance(module, nn.Linear) else weight.T]


def in_layout(module: nn.Module, groups: Sequence[Tensor]) -> Tensor:
    """Matrices in the shape of the module's weight."""
    if isinstance(module, nn.Conv2d):
        return torch.cat(list(groups)).reshape(module.weight.shape)
    return groups[0] if isinstance(module, nn.Linear) else groups[0].T


# Bases (Algorithms 2 and 3, and FACTS.md section 1)


def covariance(rows: Tensor, centre: Tensor | None = None) -> Tensor:
    """The mean of (x − c)(x − c)ᵀ, about the mean where no centre is given."""
    centred = rows - (rows.mean(0) if centre is None else centre)
    return centred.T @ centred / len(rows)


def ridged(matrix: Tensor, ridge: float) -> Tensor:
    """matrix + ridge · (its mean eigenvalue) · I."""
    mean = torch.linalg.eigvalsh(matrix).mean()
    return matrix + ridge * mean * torch.eye(len(matrix), dtype=matrix.dtype)


def pca_basis(rows: Tensor, rank: int) -> Tensor:
    """PcaBasis (Algorithm 2): the leading eigenvectors of the centred covariance that have variance."""
    _, values, vectors = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return vectors[:rank][values[:rank] > 1e-6 * values[0]].T


def cav_basis(forget: Tensor, clusters: Sequence[Tensor], retain: Tensor, ridge: float, centering: str) -> Tensor:
    """CavBasis (Algorithm 3) for given clusters, each the places of its rows in `forget`."""
    centre = forget.mean(0) if centering == "separate" else retain.mean(0)
    forget, retain = forget - centre, retain - retain.mean(0)
    probes = []
    for cluster in clusters:
        positive, negative = forget[cluster], retain
        samples = torch.cat([positive, negative]).T
        signs = torch.cat([torch.ones(len(positive)), -torch.ones(len(negative))]).double()
        if positive.mean(0).norm() > EPSILON * forget.std(0).norm():
            probes.append(torch.linalg.solve(ridged(samples @ samples.T, ridge), samples @ signs))
    return gram_schmidt(probes, forget.shape[1])


def lda_basis(forget: Tensor, classes: Sequence[Tensor], retain: Tensor, ridge: float) -> Tensor:
    """orth((Cov_S + ridge)⁻¹ (m_c − m_R)) over the forgotten classes."""
    system = ridged(covariance(torch.cat([forget, retain])), ridge)
    shifts = [forget[places].mean(0) - retain.mean(0) for places in classes]
    return gram_schmidt([torch.linalg.solve(system, shift) for shift in shifts], forget.shape[1])


def contrastive_basis(forget: Tensor, retain: Tensor, rank: int, ridge: float) -> Tensor:
    """orth of the top generalised eigenvectors of Σ_F v = ρ (Σ_R + ridge) v, Σ_F about m_R."""
    values, vectors = torch.linalg.eigh(ridged(covariance(retain), ridge))
    whitening = vectors @ torch.diag(values**-0.5) @ vectors.T
    ratios, found = torch.linalg.eigh(whitening @ covariance(forget, retain.mean(0)) @ whitening)
    kept = found[:, ratios > 1e-12 * ratios[-1]].flip(1)[:, :rank]
    return gram_schmidt(list((whitening @ kept).T), forget.shape[1])


def wiener_task(
    forget: Tensor,
    retain: Tensor,
    rank: int,
    ridge: float,
    lam: float,
    task_vector: Tensor,
    heavy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """τ Σ_F (Σ_F + λ(Σ_R + ridge))⁻¹ (wiener) on its leading generalised eigenvectors, and a basis of its rows.

    The moments are about 0, the ridge is relative to the variance. heavy: a direction that is as good as forbidden.
    """
    mean = retain.mean(0)
    first, second = forget.T @ forget / len(forget), ridged(covariance(retain), ridge) + torch.outer(mean, mean)
    if heavy is not None:
        second = second + 1e6 * covariance(retain).trace() * torch.outer(heavy, heavy) / (heavy @ heavy)
    values, vectors = torch.linalg.eigh(second)
    whitening = vectors @ torch.diag(values**-0.5) @ vectors.T
    ratios, found = torch.linalg.eigh(whitening @ first @ whitening)
    kept = whitening @ found[:, ratios > 1e-12 * ratios[-1]].flip(1)[:, :rank]  # retain moments of 1, forget ones of ρ
    projection = second @ kept @ kept.T  # x to its part in these directions
    task = task_vector @ projection @ first @ torch.linalg.inv(first + lam * second)
    return task, gram_schmidt(list(kept.T), forget.shape[1])


def deflated_basis(forget: Tensor, retain: Tensor, deflate: int, rank: int) -> Tensor:
    """PcaBasis of what the leading retain eigenvectors leave of the forget inputs."""
    removed = pca_basis(retain, deflate)
    return pca_basis(forget - forget @ removed @ removed.T, rank)


def private_mean_task(
    forget: Tensor,
    forget_classes: Sequence[Tensor],
    retain: Tensor,
    retain_classes: Sequence[Tensor],
    ridge: float,
    task_vector: Tensor,
) -> tuple[Tensor, Tensor]:
    """τ L Q_w Q_wᵀ L⁻¹ (private-mean) and an orthonormal basis of its rows."""
    every = [forget[places] for places in forget_classes] + [retain[places] for places in retain_classes]
    within = torch.cat([rows - rows.mean(0) for rows in every])
    factor = torch.linalg.cholesky(ridged(within.T @ within / len(within), ridge))
    inverse = torch.linalg.inv(factor)
    mean = retain.mean(0)
    kept = inverse @ torch.stack([retain[places].mean(0) - mean for places in retain_classes], dim=1)
    lost = inverse @ torch.stack([forget[places].mean(0) - mean for places in forget_classes], dim=1)
    span = left_singular(kept, torch.cat([kept, lost], dim=1))  # a single retain class has no span
    whitened = left_singular(lost - span @ span.T @ lost, lost)
    basis = left_singular(inverse.T @ whitened, inverse.T @ whitened)
    return task_vector @ factor @ whitened @ whitened.T @ inverse, basis


def left_singular(matrix: Tensor, scale: Tensor) -> Tensor:
    """The left singular vectors of a matrix that are above 1e-6 of the largest singular value of `scale`."""
    vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    return vectors[:, values > 1e-6 * torch.linalg.matrix_norm(scale, 2)]


def gram_schmidt(probes: Sequence[Tensor], features: int) -> Tensor:
    """Lines 10-13 of Algorithm 3: orthogonalise in order, drop what is negligible, normalise."""
    basis = torch.zeros(features, 0, dtype=torch.float64)
    for probe in probes:
        left = probe - basis @ (basis.T @ probe)
        left = left - basis @ (basis.T @ left)
        if left.norm() > EPSILON * probe.norm():
            basis = torch.cat([basis, (left / left.norm()).unsqueeze(1)], dim=1)
    return basis


# Solvers (eq. "closed", phase 2 of Algorithm 1, eq. "clip")


def exact(projection: Tensor, overlap: Tensor, lam: float, gamma: float) -> Tensor:
    """B* = τQ ((1 + γ)I + λCCᵀ)⁻¹."""
    identity = torch.eye(len(overlap), dtype=overlap.dtype)
    return projection @ torch.linalg.inv((1 + gamma) * identity + lam * overlap @ overlap.T)


def adam(projection: Tensor, overlap: Tensor, lam: float, gamma: float, steps: int, lr: float) -> Tensor:
    """Phase 2 as the paper's code has it: Adam on a loss whose terms are averaged over their entries."""
    coefficients = projection.clone().requires_grad_()
    optimizer = torch.optim.Adam([coefficients], lr=lr)
    for _ in range(steps):
        with torch.enable_grad():
            loss = (projection - coefficients).square().mean() + gamma * coefficients.square().mean()
            if overlap.shape[1]:
                loss = loss + lam * (coefficients @ overlap).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return coefficients.detach()


def clipped(projection: Tensor, overlap: Tensor, lam: float, gamma: float, delta: float) -> Tensor:
    """B_δ = B* + S_δ(B₀ − B*), with λ_eff = λ k_F / k_R."""
    forget_rank, retain_rank = overlap.shape
    minimiser = exact(projection, overlap, lam * forget_rank / max(retain_rank, 1), gamma)
    difference = projection - minimiser
    return minimiser + difference.sign() * (difference.abs() - delta).clamp_min(0)


def solved(projection: Tensor, overlap: Tensor, recipe: Any) -> Tensor:
    """The coefficients that the recipe's solver finds."""
    if recipe.solver == "budgeted":
        return adam(projection, overlap, recipe.lam, recipe.gamma, recipe.steps, recipe.lr)
    if recipe.solver == "soft-threshold":
        return clipped(projection, overlap, recipe.lam, recipe.gamma, recipe.delta)
    return exact(projection, overlap, recipe.lam, recipe.gamma)


# Algorithm 1


def unmerge(
    model: nn.Module,
    names: Sequence[str],
    forget: tuple[Tensor, Tensor | None],
    retain: tuple[Tensor, Tensor | None],
    recipe: Any,
    init: Mapping[str, Tensor] | None = None,
    clusters: Mapping[str, list[Tensor]] | None = None,
    norms: Mapping[str, str] | None = None,
) -> dict[str, Layer]:
    """Phases 1 and 2 of Algorithm 1: every layer's τ_F.

    init: the initial weights, zero where not given. clusters: for cav-kmeans the cluster of each forget row,
    one entry a group. norms: the BatchNorm behind a layer without a bias, which takes its constant.
    """
    lost, kept = layer_inputs(model, names, *forget), layer_inputs(model, names, *retain)
    layers = {}
    for name in names:
        module = model.get_submodule(name)
        initial = torch.zeros_like(module.weight) if init is None else init[f"{name}.weight"]
        task_vectors = matrices(module, module.weight.detach().double() - initial.double())
        own = clusters[name] if clusters else None
        takes_constant = getattr(module, "bias", None) is not None or name in (norms or {})
        keeps_mean = recipe.mean == "orthogonal" or (recipe.mean != "free" and takes_constant)
        found = [
            _group(lost[name], kept[name], group, task_vector, recipe, own, keeps_mean)
            for group, task_vector in enumerate(task_vectors)
        ]
        means = [rows.mean(0) for rows in kept[name].groups]
        if recipe.mean == "orthogonal":
            found = [(*outside(mean, *parts[:2]), parts[2]) for mean, parts in zip(means, found, strict=True)]
        layers[name] = Layer(*(list(parts) for parts in zip(*found, strict=True)), means)
    return layers


def edited(
    model: nn.Module,
    layers: Mapping[str, Layer],
    recipe: Any,
    alpha: float,
    init: Mapping[str, Tensor] | None = None,
    norms: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Phase 3: the tensors of the model that change, with their new values, in float64.

    norms: for a layer without bias, the BatchNorm that takes the constant when the mean is preserved.
    """
    state = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    changed: dict[str, Tensor] = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        changed[f"{name}.weight"] = state[f"{name}.weight"] - alpha * in_layout(module, layer.forget_task)
        has_bias = getattr(module, "bias", None) is not None
        if has_bias:
            bias = state[f"{name}.bias"]
            if recipe.bias == "shrink":
                initial = torch.zeros_like(bias) if init is None else init[f"{name}.bias"].double()
                keep = 1 - alpha * recipe.gamma / (1 + recipe.gamma)
                bias = initial + keep * (bias - initial)
            if recipe.mean in ("auto", "preserve"):
                bias = bias + alpha * layer.constant
            changed[f"{name}.bias"] = bias
        elif recipe.mean in ("auto", "preserve") and norms and name in norms:
            buffer = f"{norms[name]}.running_mean"
            changed[buffer] = state[buffer] - alpha * layer.constant
    return changed


def _group(
    lost: Inputs,
    kept: Inputs,
    group: int,
    task_vector: Tensor,
    recipe: Any,
    clusters: list[Tensor] | None,
    keeps_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """τ_F, Q_F and Q_R of one group; keeps_mean: whether a bias takes the edit's response to the mean retain input."""
    forget, retain = lost.groups[group], kept.groups[group]
    retain_basis = pca_basis(retain, recipe.retain_rank)
    if recipe.basis == "private-mean":
        classes, others = by_class(lost.labels), by_class(kept.labels)
        task, basis = private_mean_task(forget, classes, retain, others, recipe.ridge, task_vector)
        return task, basis, retain_basis
    if recipe.basis == "wiener":
        centre = retain.mean(0) if keeps_mean else 0.0
        heavy = retain.mean(0) if recipe.mean == "orthogonal" else None
        pools = forget - centre, retain - centre
        task, basis = wiener_task(*pools, recipe.rank, recipe.ridge, recipe.lam, task_vector, heavy)
        return task, basis, retain_basis
    if recipe.basis == "pca":
        basis = pca_basis(forget, recipe.rank)
    elif recipe.basis == "lda":
        classes = [torch.arange(len(forget))] if lost.labels is None else by_class(lost.labels)
        basis = lda_basis(forget, classes, retain, recipe.ridge)
    elif recipe.basis == "contrastive":
        basis = contrastive_basis(forget, retain, recipe.rank, recipe.ridge)
    elif recipe.basis == "deflated-pca":
        basis = deflated_basis(forget, retain, recipe.deflate, recipe.rank)
    else:
        few, others = lost.first(recipe.max_points), kept.first(recipe.max_points)
        parts = by_class(few.labels if recipe.basis == "cav-class" else clusters[group])
        basis = cav_basis(few.groups[group], parts, others.groups[group], recipe.ridge, recipe.centering)
    coefficients = solved(task_vector @ basis, basis.T @ retain_basis, recipe)
    return coefficients @ basis.T, basis, retain_basis


def outside(mean: Tensor, task: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """An edit, and a basis of its rows, that do not answer to the mean."""
    projection = torch.eye(len(mean), dtype=mean.dtype) - torch.outer(mean, mean) / (mean @ mean)
    return task @ projection, gram_schmidt(list((projection @ basis).T), len(mean))


def by_class(labels: Tensor) -> list[Tensor]:
    """The places of each label, in ascending order of the labels."""
    return [(labels == label).nonzero()[:, 0] for label in labels.unique()]
