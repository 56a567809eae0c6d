"""k-means: a fixed point of Lloyd's iteration that depends on its seed and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmerge.linalg.kmeans import kmeans


def blobs(clusters: int, each: int, features: int = 4, apart: float = 30.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows around centres that lie far apart, in mixed order, and the centre of each."""
    generator = torch.Generator().manual_seed(seed)
    centres = apart * torch.linalg.qr(torch.randn(features, features, generator=generator))[0][:clusters]
    owner = torch.arange(clusters).repeat(each)
    owner = owner[torch.randperm(len(owner), generator=generator)]
    return centres[owner] + torch.randn(len(owner), features, generator=generator), owner


def same_partition(one: Tensor, other: Tensor) -> bool:
    """Whether two assignments put the same rows together, whatever the numbers of the clusters."""
    return torch.equal(one.unsqueeze(0) == one.unsqueeze(1), other.unsqueeze(0) == other.unsqueeze(1))


@pytest.mark.parametrize("seed", range(5))
def test_separate_clusters_are_found(seed: int) -> None:
    rows, owner = blobs(4, 12, seed=seed)
    assert same_partition(kmeans(rows, 4, seed), owner)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 40),
    features=st.integers(1, 5),
    clusters=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_every_row_is_nearest_to_the_mean_of_its_cluster(count: int, features: int, clusters: int, seed: int) -> None:
    rows = torch.randn(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assigned = kmeans(rows, clusters, seed)
    assert assigned.shape == (count,)
    assert assigned.min() >= 0
    assert assigned.max() < min(clusters, count)
    present = assigned.unique()
    means = torch.stack([rows[assigned == cluster].mean(0) for cluster in present])
    distances = (rows.unsqueeze(1) - means).norm(dim=2)
    own = distances.gather(1, torch.searchsorted(present, assigned).unsqueeze(1))[:, 0]
    assert (own <= distances.min(1).values + 1e-5).all()


@pytest.mark.parametrize(("distinct", "clusters"), [(3, 8), (1, 4), (5, 6)])
def test_fewer_different_rows_than_clusters_give_a_cluster_each(distinct: int, clusters: int) -> None:
    different = torch.eye(distinct, 6)
    rows = different.repeat(7, 1)
    assert same_partition(kmeans(rows, clusters, 0), torch.arange(distinct).repeat(7))


def test_more_clusters_than_rows_are_as_many_as_rows() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert kmeans(rows, 9, 0).sort().values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("offset", [300.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clusters_do_not_depend_on_where_the_origin_is(offset: float, dtype: torch.dtype) -> None:
    """Deviation 1, mean 300 and more: distances from squared norms would cancel."""
    rows, _ = blobs(6, 60, features=16, apart=6.0)
    rows = (rows.double() + offset).to(dtype)
    centred = rows.double() - offset
    assert same_partition(kmeans(rows, 6, 0), kmeans(centred, 6, 0))


def test_the_seed_decides_and_the_global_random_state_stays() -> None:
    rows = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    first, second, other = (kmeans(rows, 7, seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())
