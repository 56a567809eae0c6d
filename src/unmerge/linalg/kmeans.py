"""k-means on the rows that a pass kept."""

from __future__ import annotations

import torch
from torch import Tensor

_ITERATIONS = 50


def kmeans(rows: Tensor, clusters: int, seed: int) -> Tensor:
    """The cluster of each row: k-means++ start, then Lloyd's iteration until no row moves."""
    generator = torch.Generator().manual_seed(seed)
    rows = (rows.double() - rows.double().mean(0)).float()  # distances of a large common mean would be rounding
    centres = _spread_start(rows, min(clusters, len(rows)), generator)
    assigned = torch.full((len(rows),), -1, device=rows.device)
    for _ in range(_ITERATIONS):
        moved = torch.cdist(rows, centres).argmin(1)
        if torch.equal(moved, assigned):
            break
        assigned = moved
        sums = torch.zeros_like(centres).index_add_(0, assigned, rows)
        counts = torch.bincount(assigned, minlength=len(centres)).unsqueeze(1)
        # An empty cluster keeps its centre.
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return assigned


def _spread_start(rows: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centres drawn one after another, each with a chance that grows with its squared distance to the others."""
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    distance = (rows - rows[chosen[0]]).square().sum(1)
    for _ in range(clusters - 1):
        chance = distance.cpu().double().clamp_min(0)
        if chance.sum() == 0:  # fewer different rows than clusters
            break
        chosen.append(int(torch.multinomial(chance, 1, generator=generator)))
        distance = torch.minimum(distance, (rows - rows[chosen[-1]]).square().sum(1))
    return rows[chosen]
