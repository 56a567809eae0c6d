"""The Gram of a 3x3 convolution's input without unfolding it.

The unfolded input holds nine shifted copies of the image, so a block of its Gram depends only on how far two
copies are shifted against each other: 25 distances, 13 up to transposition, instead of 81 blocks. Two equal
shifts also lose the border that one of them pushes out of the image; those borders are summed apart.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from unmerge.linalg.products import add_product_, is_exact
from unmerge.sums.moments import Moments
from unmerge.sums.pivots import mean_dominates
from unmerge.sums.second_order import witness

_DISTANCES = [(0, 0), (0, 1), (0, 2), *product((1, 2), range(-2, 3))]
_TAPS = list(product((-1, 0, 1), (-1, 0, 1)))
_WIDENED = 1 << 22  # elements of an input that are copied to float64 at a time


def applies(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the module is a plain 3x3 convolution of stride 1 whose input needs no pivot."""
    if not fits(module, inputs):
        return False
    # The border of zeros has no pivot.
    return not mean_dominates(inputs.permute(0, 2, 3, 1).reshape(-1, inputs.shape[1])).any()


def fits(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the module is a plain 3x3 convolution of stride 1."""
    # On a GPU one large product over unfolded rows beats many small ones.
    if not isinstance(module, nn.Conv2d) or inputs.dim() != 4 or inputs.is_cuda:
        return False
    return (
        module.kernel_size == (3, 3)
        and module.stride == (1, 1)
        and module.dilation == (1, 1)
        and module.groups == 1
        and module.padding in ((1, 1), "same")
        and module.padding_mode == "zeros"
    )


class ShiftedMoments:
    """Moments of the rows of a plain 3x3 convolution, summed by shift."""

    def __init__(self) -> None:
        self.n = 0
        self._kept = torch.float32  # the type of the finished Gram
        self._blocks = torch.zeros(0, 0, 0)  # one (channels, channels) sum a distance, then a border, float64
        self.total = torch.zeros(0)  # Σ rows, float64

    def update(self, inputs: Tensor) -> Tensor:
        """Count a batch (samples, channels, height, width); returns the sum of its rows for each sample."""
        _, channels, height, width = inputs.shape
        if self.n == 0:
            shape = (len(_DISTANCES) + len(_BORDERS), channels, channels)
            self._kept = torch.promote_types(inputs.dtype, torch.float32)
            self._blocks = torch.zeros(shape, dtype=torch.float64, device=inputs.device)
            self.total = torch.zeros(9 * channels, dtype=torch.float64, device=inputs.device)
        if not is_exact(9 * channels, inputs.device):
            return self._count(inputs)
        size = max(1, _WIDENED // (channels * height * width))
        return torch.cat([self._count(part.double()) for part in inputs.split(size)])

    def _count(self, inputs: Tensor) -> Tensor:
        samples, _, height, width = inputs.shape
        # Places first: a run of places is then one matrix of rows, and no shift needs a copy.
        image = inputs.permute(2, 3, 0, 1).contiguous()
        blocks = torch.zeros_like(self._blocks, dtype=torch.promote_types(inputs.dtype, torch.float32))
        for block, (down, right) in zip(blocks, _DISTANCES, strict=False):
            _add_shifted(block, image, down, right)
        for block, (row, column, (down, right)) in zip(blocks[len(_DISTANCES) :], _BORDERS, strict=True):
            _add_shifted(block, image[_edge(row), _edge(column)].contiguous(), down, right)
        self._blocks += blocks
        self.n += samples * height * width
        sums = _row_sums(image)
        self.total += sums.sum(0, dtype=torch.float64)
        return sums

    def witness(self) -> Tensor:
        """A number that is finite where no sum has overflowed or met a NaN."""
        return witness(self.total, self._blocks.diagonal(dim1=-2, dim2=-1), self._kept)

    def finish(self) -> Moments:
        """The same moments in their usual form, features ordered as an unfolded weight is."""
        distances = dict(zip(_DISTANCES, self._blocks, strict=False))
        borders = dict(zip(_BORDERS, self._blocks[len(_DISTANCES) :], strict=True))
        channels = self._blocks.shape[-1]
        gram = self._blocks.new_empty(channels, 9, channels, 9)
        for (first, one), (second, two) in product(enumerate(_TAPS), repeat=2):
            distance = (two[0] - one[0], two[1] - one[1])
            if distance not in distances:
                continue
            block = distances[distance]
            if borders_of := _lost_borders(one, distance):
                block = block.clone()
                for sign, border in borders_of:
                    block += sign * borders[border]
            gram[:, first, :, second] = block
            if first != second:
                gram[:, second, :, first] = block.mT
        zero = torch.zeros_like(self.total)
        return Moments.build(self.n, zero, self.total, gram.view(9 * channels, 9 * channels), kept=self._kept)


Border = tuple[int | None, int | None, tuple[int, int]]  # edge row, edge column, distance along the edge

_BORDERS: list[Border] = [
    *((row, None, (0, along)) for row in (0, -1) for along in range(3)),
    *((None, column, (along, 0)) for column in (0, -1) for along in range(3)),
    *((row, column, (0, 0)) for row in (0, -1) for column in (0, -1)),
]


def _lost_borders(tap: tuple[int, int], distance: tuple[int, int]) -> list[tuple[int, Border]]:
    """What two copies shifted alike in one direction lose of the image, corners counted once."""
    # A copy shifted by +1 never shows the first row, one shifted by -1 never the last.
    row = _edge_lost(tap[0]) if distance[0] == 0 else None
    column = _edge_lost(tap[1]) if distance[1] == 0 else None
    lost: list[tuple[int, Border]] = []
    if row is not None:
        lost.append((-1, (row, None, distance)))
    if column is not None:
        lost.append((-1, (None, column, distance)))
    if row is not None and column is not None:
        lost.append((+1, (row, column, distance)))
    return lost


def _edge_lost(shift: int) -> int | None:
    return {1: 0, -1: -1}.get(shift)


def _edge(index: int | None) -> slice:
    return slice(None) if index is None else slice(0, 1) if index == 0 else slice(-1, None)


def _add_shifted(out: Tensor, image: Tensor, down: int, right: int) -> None:
    """out += Σ x(q) x(q + shift)ᵀ over all places q where both lie in the image."""
    height, width, _, channels = image.shape
    if down >= height or abs(right) >= width:
        return
    here = image[: height - down, max(0, -right) : width - max(0, right)]
    there = image[down:, max(0, right) : width + min(0, right)]
    runs = [(here, there)] if right == 0 else zip(here, there, strict=True)
    for left, other in runs:
        add_product_(out, left.view(-1, channels).mT, other.view(-1, channels))


def _row_sums(image: Tensor) -> Tensor:
    """For each sample the sum of its unfolded rows, (samples, channels * 9)."""
    whole = image.sum((0, 1), dtype=torch.float32 if image.dtype != torch.float64 else None)
    sums = []
    for tap in _TAPS:
        part = whole
        for sign, (row, column, _) in _lost_borders(tap, (0, 0)):
            part = part + sign * image[_edge(row), _edge(column)].sum((0, 1), dtype=whole.dtype)
        sums.append(part)
    return torch.stack(sums, dim=-1).flatten(1)
