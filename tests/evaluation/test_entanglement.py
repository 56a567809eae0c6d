"""The four distances against double loops, closed forms and POT."""

import math

import pytest
import torch
from torch import Tensor

from unmerge.evaluation.entanglement import bures, compare, distances, mmd, sliced
from unmerge.evaluation.subject import Setting


def normal(size: int, width: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, width, generator=generator, dtype=torch.float64) + shift


def with_moments(sample: Tensor, mean: Tensor, deviations: Tensor) -> Tensor:
    """The sample moved so that its mean and (unbiased, diagonal) covariance are exactly these."""
    centred = sample - sample.mean(0)
    factor = torch.linalg.cholesky(centred.mT @ centred / (len(sample) - 1))
    return torch.linalg.solve_triangular(factor, centred.mT, upper=False).mT * deviations + mean


def mmd_by_loops(first: Tensor, second: Tensor) -> tuple[float, float]:
    points = torch.cat([first, second]).tolist()
    pairs = sorted(math.dist(a, b) ** 2 for i, a in enumerate(points) for b in points[:i])
    median = pairs[(len(pairs) - 1) // 2]

    def at(scale: float) -> float:
        def mean(rows: Tensor, others: Tensor, same: bool) -> float:
            values = [
                math.exp(-(math.dist(a, b) ** 2) / (2 * median * scale**2))
                for i, a in enumerate(rows.tolist())
                for j, b in enumerate(others.tolist())
                if not (same and i == j)
            ]
            return sum(values) / len(values)

        return mean(first, first, True) + mean(second, second, True) - 2 * mean(first, second, False)

    return at(1), (at(0.5) + at(1) + at(2)) / 3


@pytest.mark.parametrize(("sizes", "offset"), [((9, 9), 0.0), ((12, 7), 0.0), ((8, 8), 1000.0)])
def test_mmd_equals_a_double_loop(sizes: tuple[int, int], offset: float) -> None:
    first, second = normal(sizes[0], 3, 0, offset), normal(sizes[1], 3, 1, offset + 0.7)
    assert mmd(first, second) == pytest.approx(mmd_by_loops(first, second), rel=1e-5)


def test_mmd_spans_blocks() -> None:
    first, second = normal(1100, 2, 0), normal(1100, 2, 1, 0.5)
    squared = torch.cdist(torch.cat([first, second]), torch.cat([first, second])).square()
    median = squared[torch.ones_like(squared).triu(1).bool()].median()
    kernel = (-squared / (2 * median)).exp()
    within = sum((part.sum() - 1100) / (1100 * 1099) for part in (kernel[:1100, :1100], kernel[1100:, 1100:]))
    assert mmd(first, second)[0] == pytest.approx((within - 2 * kernel[:1100, 1100:].mean()).item(), rel=1e-4)


def test_equal_distributions_are_near_zero() -> None:
    first, second = normal(1500, 4, 0), normal(1500, 4, 1)
    near, far = distances(first, second, 100), distances(first, second + 1, 100)
    for name in near:
        assert abs(near[name]) < 0.05 * far[name], name
    same = distances(first, first, 100)
    assert same["sliced W2²"] == 0
    assert same["Bures W2²"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("size", [40, 5])  # more samples than features, and fewer
def test_bures_of_shifted_samples_is_the_squared_shift(size: int) -> None:
    sample = normal(size, 6, 0)
    shift = torch.arange(6, dtype=torch.float64)
    assert bures(sample, sample + shift) == pytest.approx(55, rel=1e-9)


def test_bures_of_gaussians_with_known_distance() -> None:
    first = with_moments(normal(50, 3, 0), torch.tensor([0.0, 1, 2]).double(), torch.tensor([1.0, 2, 3]).double())
    second = with_moments(normal(30, 3, 1), torch.tensor([0.0, 0, 0]).double(), torch.tensor([2.0, 2, 1]).double())
    assert bures(first, second) == pytest.approx((1 + 4) + (1 + 0 + 4), rel=1e-9)


def test_bures_with_fewer_samples_than_features_equals_the_formula() -> None:
    first, second = normal(7, 10, 0) @ normal(10, 10, 2), normal(9, 10, 1, 0.3)
    covariances = [torch.cov(sample.mT) for sample in (first, second)]
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    expected = (first.mean(0) - second.mean(0)).square().sum() + sum(c.trace() for c in covariances) - 2 * cross
    assert bures(first, second) == pytest.approx(expected.item(), rel=1e-6)


def test_sliced_of_shifted_samples() -> None:
    sample = normal(60, 5, 0)
    shift = torch.tensor([3.0, 0, 0, 0, 4.0]).double()
    # E (θ·v)² = |v|² / d over directions.
    assert sliced(sample, sample + shift, 20_000) == pytest.approx(25 / 5, rel=0.03)
    assert sliced(sample, sample + shift, seed=1) == sliced(sample, sample + shift, seed=1)


@pytest.mark.parametrize("size", [40, 25])
def test_sliced_and_bures_equal_pot(size: int) -> None:
    ot = pytest.importorskip("ot")
    first, second = normal(40, 4, 0), 1.5 * normal(size, 4, 1, 0.4)
    generator = torch.Generator().manual_seed(7)
    directions = torch.randn(4, 300, generator=generator, dtype=torch.float64)
    directions = (directions / directions.norm(dim=0)).numpy()
    theirs = ot.sliced_wasserstein_distance(first.numpy(), second.numpy(), projections=directions, p=2)
    assert sliced(first, second, 300, seed=7) == pytest.approx(theirs**2, rel=1e-9)
    covariances = [torch.cov(sample.mT).numpy() for sample in (first, second)]
    means = [sample.mean(0).numpy() for sample in (first, second)]
    theirs = ot.gaussian.bures_wasserstein_distance(*means, *covariances)
    assert bures(first, second) == pytest.approx(theirs**2, rel=1e-9)


def test_coinciding_points_do_not_divide_by_zero() -> None:
    same = torch.ones(6, 3, dtype=torch.float64)
    assert all(value == pytest.approx(0, abs=1e-12) for value in distances(same, same, 10).values())


def test_gaps_and_a_reference_distance_that_is_no_unit() -> None:
    own = {"MMD²": 0.3, "sliced W2²": 3.0}
    found = compare(own, {"MMD²": 0.2, "sliced W2²": 2.0}, Setting())
    row = {column.label: figure.value for column, figure in found.rows["entanglement"].items()}
    assert row == pytest.approx({"MMD²": 0.5, "sliced W2²": 0.5, "mean gap": 0.5})
    found = compare(own, {"MMD²": -1e-4, "sliced W2²": 2.0}, Setting())
    assert "not above 0" in found.missing["MMD²"]
    assert [column.label for column in found.rows["entanglement"]] == ["sliced W2²"]
    assert "reference" in compare(own, None, Setting()).missing["gaps"]
