"""The class means of a layer, whitened by the scatter within classes: class requests are small problems in their span.

The span depends on the statistics of everything alone, which keep it: the next request on them has as many dimensions
as there are classes, whatever the width of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmerge.orthonormal import NEGLIGIBLE, column_span, orthonormal_columns, orthonormal_rows, outside, spanning

Places = Sequence[int]  # of classes


@dataclass(frozen=True)
class WhitenedMeans:
    """Class means m as coordinates c, L⁻¹(m − m_S) = O c, where L Lᵀ is the within-class scatter and OᵀO = I.

    What grows with the width of the layer stays on its device, all else is small and on the CPU.
    """

    rows: Tensor  # (means,) that each stands for
    groups: Tensor  # (means,) equal where two means are parts of one class
    coordinates: Tensor  # (r, means)
    frame: Tensor  # (in, r), orthonormal: the directions that respond to the coordinates, the span of L⁻ᵀ O
    turn: Tensor  # (r, r): L⁻ᵀ O = frame · turn
    responses: Tensor  # (in, r): L O
    lengths: Tensor  # (r, r): the Gram of the responses, so that c has the length √(cᵀ lengths c) in the input
    spread: float  # √(trace of the covariance of the input)

    @classmethod
    def of(cls, rows: Tensor, groups: Tensor, shifts: Tensor, factor: Tensor, spread: Tensor) -> WhitenedMeans:
        """From the means' rows m − m_S and L."""
        width = len(factor)
        # The rows sum to zero with their counts as weights, so one of them is implied: the one of most rows.
        implied = int(rows.argmax())
        others = [place for place in range(len(rows)) if place != implied]
        whitened = torch.linalg.solve_triangular(factor, shifts[others].mT.double(), upper=False)
        if len(others) < width:
            span = column_span(whitened, at_least=whitened.new_zeros(()))
            found = span.mT @ whitened
            directions, responses = torch.linalg.solve_triangular(factor.mT, span, upper=True), factor @ span
        else:
            found, responses = whitened, factor
            identity = torch.eye(width, dtype=factor.dtype, device=factor.device)
            directions = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        frame = orthonormal_columns(directions)
        counts = rows.cpu().double()
        coordinates = torch.zeros(len(found), len(rows), dtype=torch.float64)
        coordinates[:, others] = found.cpu()
        coordinates[:, implied] = -(coordinates @ counts) / counts[implied]
        turn, lengths = (frame.mT @ directions).cpu(), (responses.mT @ responses).cpu()
        return cls(counts, groups.cpu(), coordinates, frame, turn, responses, lengths, float(spread))

    def shifts(self, places: Places, kept: Places) -> Tensor:
        """c − c_R of some classes, c_R that of the mean of the retained ones."""
        weights = self.rows[kept] / self.rows[kept].sum()
        return self.coordinates[:, places] - (self.coordinates[:, kept] @ weights).unsqueeze(1)

    def lost_shifts(self, lost: Places, kept: Places) -> Tensor:
        """Those of the forgotten classes; one whose mean is m_R has no direction, and rounding would make one up."""
        shifts = self.shifts(lost, kept)
        sizes = (shifts * (self.lengths @ shifts)).sum(0).clamp_min(0).sqrt()
        return shifts[:, sizes > NEGLIGIBLE * self.spread]

    def lda(self, lost: Places, kept: Places) -> Tensor:
        """orth(Σ⁻¹ (m_c − m_R)) in coordinates of the frame, Σ the scatter within classes and between them."""
        between = self._between()
        system = between @ between.mT
        system.diagonal().add_(1)
        # Σ⁻¹ L = L⁻ᵀ (I + between betweenᵀ)⁻¹ in these coordinates.
        probes = torch.cholesky_solve(self.lost_shifts(lost, kept), torch.linalg.cholesky(system))
        return orthonormal_rows((self.turn @ probes).mT)

    def private(self, lost: Places, kept: Places) -> Tensor:
        """The span of the forgotten means outside that of the retained ones, in whitened coordinates."""
        whitened = self.lost_shifts(lost, kept)
        size = whitened.norm()
        # Of the retained shifts one is implied too. Where their means are m_R, as that of a single class is, they are
        # rounding, which spans nothing.
        rest = outside(whitened, self.shifts(kept[:-1], kept), at_least=1e-9 * size)
        return spanning(rest, at_least=NEGLIGIBLE * size)

    def _between(self) -> Tensor:
        """√n (c of the class), one column a class."""
        count = int(self.groups.max()) + 1
        rows = torch.zeros(count, dtype=torch.float64).index_add_(0, self.groups, self.rows)
        sums = torch.zeros(len(self.coordinates), count, dtype=torch.float64)
        sums.index_add_(1, self.groups, self.coordinates * self.rows)
        return sums / rows.clamp_min(1).sqrt()
