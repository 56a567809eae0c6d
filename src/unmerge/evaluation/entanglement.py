"""How far apart forget and retain features lie, against how far apart the retrained model puts them."""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.evaluation.result import Better, Column, Figure, Row
from unmerge.evaluation.subject import NO_REFERENCE, Findings, NotMeasurable, Setting, Subject, needed_features

NEEDS_FEATURES = True
SCALES = (0.5, 1.0, 2.0)
PROJECTIONS = 1000
MAX_SAMPLES = 2500
_BLOCK = 1024  # rows of the distance matrix at once


def distances(first: Tensor, second: Tensor, projections: int = PROJECTIONS, seed: int = 0) -> dict[str, float]:
    """The four distances between two samples of features: MMD², MMD² over three scales, Bures and sliced W₂²."""
    first, second = first.double(), second.double()
    single, several = mmd(first, second)
    return {
        "MMD²": single,
        "MMD²-multi": several,
        "Bures W2²": bures(first, second),
        "sliced W2²": sliced(first, second, projections, seed),
    }


def mmd(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Unbiased Gaussian MMD² at the median bandwidth, and its mean over the bandwidths .5, 1 and 2 times that.

    k(x, y) = exp(−‖x − y‖² / 2σ²) with σ² the (lower) median squared distance of the pooled sample.
    """
    if len(first) < 2 or len(second) < 2:
        raise NotMeasurable(f"an unbiased MMD needs two samples a side, not {len(first)} and {len(second)}")
    pooled = torch.cat([first, second])
    squared = _squared_distances(pooled)
    median = _median_of_pairs(squared)
    values = [_unbiased(squared, len(first), median * scale**2) for scale in SCALES]
    return values[SCALES.index(1.0)], sum(values) / len(values)


def bures(first: Tensor, second: Tensor) -> float:
    """W₂² between Gaussian fits: ‖m₁ − m₂‖² + tr S₁ + tr S₂ − 2 tr(S₁^½ S₂ S₁^½)^½.

    The last trace is the nuclear norm of A₁A₂ᵀ for any factors S = AᵀA, so that no matrix square root is
    taken: the centred samples themselves are factors, or the R of their QR where there are more samples than
    features.
    """
    shift = (first.mean(0) - second.mean(0)).square().sum()
    factors = []
    for sample in (first, second):
        centred = (sample - sample.mean(0)) / max(1, len(sample) - 1) ** 0.5
        wide = centred.shape[0] <= centred.shape[1]
        factors.append(centred if wide else torch.linalg.qr(centred, mode="r").R)
    spread = sum(factor.square().sum() for factor in factors)
    return max(0.0, (shift + spread - 2 * _nuclear_norm(factors[0] @ factors[1].mT)).item())


def sliced(first: Tensor, second: Tensor, projections: int = PROJECTIONS, seed: int = 0) -> float:
    """The mean over random directions of W₂² between the two projected samples."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(first.shape[1], projections, generator=generator, dtype=torch.float64)
    directions = (directions / directions.norm(dim=0)).to(first)
    ordered = [(sample @ directions).sort(0).values for sample in (first, second)]
    if len(first) == len(second):
        return (ordered[0] - ordered[1]).square().mean().item()
    # Quantile functions are steps: between two neighbouring levels both are constant.
    levels = torch.cat([torch.arange(len(sample) + 1, dtype=torch.float64) / len(sample) for sample in (first, second)])
    levels = levels.sort().values.to(first)
    middles, widths = (levels[1:] + levels[:-1]) / 2, levels.diff()
    steps = [values[(middles * len(values)).long().clamp(max=len(values) - 1)] for values in ordered]
    return (widths @ (steps[0] - steps[1]).square()).mean().item()


def observe(
    subject: Subject, setting: Setting, max_samples: int = MAX_SAMPLES, projections: int = PROJECTIONS
) -> dict[str, float]:
    """The four distances between forget and as many retain features."""
    (forget, _), (retain, _) = needed_features(subject, "forget", "retain")
    size = min(len(forget), len(retain), max_samples)
    first, second = (features[:size].to(subject.device) for features in (forget, retain))
    return distances(first, second, projections, setting.seed)


def compare(own: dict[str, float], retrained: dict[str, float] | None, setting: Setting) -> Findings:
    """The distances, and the relative gaps |d_UL − d_RT| / d_RT with their mean."""
    near: Better | None = None if retrained is None else "near"
    findings = Findings({"distances": {Column(name, near): Figure(value) for name, value in own.items()}})
    if retrained is None:
        findings.missing["gaps"] = NO_REFERENCE
        return findings
    # An unbiased MMD² of two alike samples may be negative, and is then no unit to measure in.
    usable = {name: value for name, value in retrained.items() if value > 0}
    gaps = {name: abs(own[name] - value) / value for name, value in usable.items()}
    for name in retrained.keys() - usable.keys():
        findings.missing[name] = (
            f"the retrained distance is {retrained[name]:.2g}, not above 0, so no gap is relative to it"
        )
    row: Row = {Column(name, "lower"): Figure(gap) for name, gap in gaps.items()}
    if len(gaps) == len(retrained):
        row[Column("mean gap", "lower")] = Figure(sum(gaps.values()) / len(gaps))
    findings.rows = {"entanglement": row} | findings.rows
    return findings


def _squared_distances(points: Tensor) -> Tensor:
    """All ‖x − y‖², products in double about the mean and the result in float."""
    points = points - points.mean(0)
    norms = points.square().sum(1)
    found = torch.empty(len(points), len(points), dtype=torch.float32, device=points.device)
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        block = norms[rows, None] + norms - 2 * points[rows] @ points.mT
        found[rows] = block.clamp_(min=0)
    return found.fill_diagonal_(0)


def _median_of_pairs(squared: Tensor) -> float:
    above = torch.ones_like(squared, dtype=torch.bool).triu_(1)
    return squared[above].median().item()


def _unbiased(squared: Tensor, size: int, variance: float) -> float:
    """MMD² without the diagonal: mean within each sample less twice the mean across."""
    if variance == 0:
        variance = float(squared.double().mean()) or 1.0  # most points coincide
    other = len(squared) - size
    within_first = within_second = across = 0.0
    for start in range(0, len(squared), _BLOCK):
        kernel = squared[start : start + _BLOCK].double().mul_(-1 / (2 * variance)).exp_()
        own = max(0, min(size - start, len(kernel)))  # rows of the first sample
        within_first += kernel[:own, :size].sum().item()
        across += kernel[:own, size:].sum().item()
        within_second += kernel[own:, size:].sum().item()
    pairs_first, pairs_second = size * (size - 1), other * (other - 1)
    return (within_first - size) / pairs_first + (within_second - other) / pairs_second - 2 * across / (size * other)


def _nuclear_norm(matrix: Tensor) -> Tensor:
    if matrix.is_cuda:  # where singular values take many times as long as eigenvalues
        return torch.linalg.eigvalsh(matrix @ matrix.mT).clamp_min(0).sqrt().sum()
    return torch.linalg.svdvals(matrix).sum()
