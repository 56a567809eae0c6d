"""The class means of a layer, whitened by the scatter within classes: class requests are small problems in their span.

The span depends on the statistics of everything alone, which keep it: the next request on them is as large as the
number of its classes, whatever the width of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmerge.linalg.orthonormal import NEGLIGIBLE, column_span, orthonormal_columns, orthonormal_rows, outside, spanning

Places = Sequence[int]  # of classes


@dataclass(frozen=True)
class WhitenedMeans:
    """Class means m as coordinates c, L⁻¹(m − m_S) = O c, where L Lᵀ is the within-class scatter and OᵀO = I.

    What grows with the width of the layer stays on its device, all else is small and on the CPU.
    """

    rows: Tensor  # (means,) that each stands for
    coordinates: Tensor  # (r, means), zero on average
    maps: Tensor  # (in, 2r): the frame, orthonormal, which spans L⁻ᵀ O and so responds to c, and the responses L O
    turn: Tensor  # (r, r): L⁻ᵀ O = frame · turn
    lengths: Tensor  # (r, r): the Gram of the responses, so that c has the length √(cᵀ lengths c) in the input
    probes: Tensor  # (r, r): Σ⁻¹ L O = frame · probes, Σ the scatter within classes and between them
    duals: Tensor | None  # (means, r): a direction for each mean in which all others are alike; None where some depend
    spread: float  # √(trace of the covariance of the input)

    @classmethod
    def of(cls, rows: Tensor, groups: Tensor, shifts: Tensor, factor: Tensor, spread: Tensor) -> WhitenedMeans:
        """From the means' rows m − m_S and L; groups are equal where two means are parts of one class."""
        width, counts = len(factor), rows.cpu().double()
        # The rows sum to zero with their counts as weights, so one of them is implied: the one of most rows.
        implied = int(counts.argmax())
        others = [place for place in range(len(counts)) if place != implied]
        whitened = torch.linalg.solve_triangular(factor, shifts[others].mT.double(), upper=False)
        if len(others) <= width:
            span = column_span(whitened, at_least=whitened.new_zeros(()))
            found = span.mT @ whitened
            directions = torch.linalg.solve_triangular(factor.mT, span, upper=True)
            responses = (span.mT @ factor.mT).mT  # as factor @ span, which BLAS takes forty times as long for
        else:
            found, responses = whitened, factor
            directions = torch.eye(width, dtype=factor.dtype, device=factor.device)
            directions = torch.linalg.solve_triangular(factor.mT, directions, upper=True)
        maps = torch.cat([orthonormal_columns(directions), responses], dim=1)
        frame, responses = maps.tensor_split(2, dim=1)
        small = torch.cat([found, frame.mT @ directions, responses.mT @ responses], dim=1).cpu()  # in one transfer
        found, turn, lengths = small.split([len(others), len(small), len(small)], dim=1)
        coordinates = torch.zeros(len(small), len(counts), dtype=torch.float64)
        coordinates[:, others] = found
        coordinates[:, implied] = -(coordinates @ counts) / counts[implied]
        # Σ⁻¹ L = L⁻ᵀ (I + between betweenᵀ)⁻¹ in these coordinates.
        between = _between(coordinates, counts, groups.cpu())
        system = torch.eye(len(small), dtype=torch.float64) + between @ between.mT
        probes = torch.cholesky_solve(turn.mT, torch.linalg.cholesky(system)).mT
        duals = _duals(found, counts, others, implied) if found.shape[0] == found.shape[1] else None
        return cls(counts, coordinates, maps, turn, lengths, probes, duals, float(spread))

    def mapped(self, directions: Tensor, answers: Tensor) -> Tensor:
        """frame · directions + responses · answers, in one product on the layer's device."""
        return self.maps @ torch.cat([directions, answers]).to(self.maps.device)

    def shifts(self, lost: Places) -> Tensor:
        """c − c_R of the forgotten classes, c_R that of the mean of the retained ones.

        One whose mean is m_R has no direction, and rounding would make one up.
        """
        shifts = self.coordinates[:, lost] - self._retained(lost)
        squares = (shifts * (self.lengths @ shifts)).sum(0)
        return shifts[:, squares > (NEGLIGIBLE * self.spread) ** 2]

    def lda(self, shifts: Tensor) -> Tensor:
        """orth(Σ⁻¹ (m_c − m_R)) in coordinates of the frame."""
        return orthonormal_rows((self.probes @ shifts).mT)

    def private(self, shifts: Tensor, lost: Places, kept: Places) -> Tensor:
        """The span of the forgotten means outside that of the retained ones, in whitened coordinates."""
        if self.duals is not None and shifts.shape[1] == len(lost):
            return spanning(self.duals[lost].mT, at_least=shifts.new_zeros(()))
        size = shifts.norm()
        retained = self.coordinates[:, kept] - self._retained(lost)
        # Of the retained shifts one is implied too. Where their means are m_R, as that of a single class is, they are
        # rounding, which spans nothing.
        rest = outside(shifts, retained[:, :-1], at_least=1e-9 * size)
        return spanning(rest, at_least=NEGLIGIBLE * size)

    def _retained(self, lost: Places) -> Tensor:
        """c_R as a column: what balances the forgotten ones, the mean of all being zero."""
        rows = self.rows[lost]
        return -(self.coordinates[:, lost] @ rows / (self.rows.sum() - rows.sum())).unsqueeze(1)


def _between(coordinates: Tensor, rows: Tensor, groups: Tensor) -> Tensor:
    """√n (c of the class), one column a class."""
    count = int(groups.max()) + 1
    totals = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, rows)
    sums = torch.zeros(len(coordinates), count, dtype=torch.float64).index_add_(1, groups, coordinates * rows)
    return sums / totals.clamp_min(1).sqrt()


def _duals(coordinates: Tensor, rows: Tensor, others: Places, implied: int) -> Tensor | None:
    """u_c with u_c · c_j = [c = j] − n_c / n for all means, from the coordinates of all but the implied one."""
    inverse, failed = torch.linalg.inv_ex(coordinates)
    if failed or not inverse.isfinite().all():
        return None
    total, shares = inverse.sum(0), rows / rows.sum()
    found = torch.zeros(len(rows), len(total), dtype=torch.float64)
    found[others] = inverse
    return found - torch.outer(shares, total)
