"""Checksums of tensors, the same on every device: do these weights equal those the statistics were read from?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A checksum a tensor: its type, shape and a 64-bit sum of its bits, each weighted by its place."""
    words = {name: _words(tensor.detach()) for name, tensor in tensors.items()}
    sums = dict.fromkeys(words, 0)
    for device in {values.device for values in words.values()}:
        parts, totals = [], []
        for names, totalled in _chunk_sums({name: word for name, word in words.items() if word.device == device}):
            parts += names
            totals.append(totalled)
        # One transfer a device instead of one a tensor.
        for name, value in zip(parts, torch.cat(totals).tolist() if totals else [], strict=True):
            sums[name] += value
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{sums[name] & (2**64 - 1):016x}"
        for name, tensor in tensors.items()
    }


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model, also those that state_dict leaves out."""
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    return state


def differences(found: Mapping[str, str], expected: Mapping[str, str], names: Iterable[str] | None = None) -> list[str]:
    """The names, in order, whose checksums are not the same or that stand on one side only."""
    keys = list(dict.fromkeys([*expected, *found])) if names is None else list(names)
    return [name for name in keys if found.get(name) != expected.get(name)]


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw


def _chunk_sums(words: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Weighted sums of pieces of at most a chunk, many small tensors in one go."""
    names: list[str] = []
    pieces: list[Tensor] = []
    starts: list[int] = []
    filled = 0
    for name, word in words.items():
        for start in range(0, word.numel(), _CHUNK):
            piece = word[start : start + _CHUNK]
            if filled + piece.numel() > _CHUNK and names:
                yield names, _weighted_sums(pieces, starts)
                names, pieces, starts, filled = [], [], [], 0
            names.append(name)
            pieces.append(piece)
            starts.append(start)
            filled += piece.numel()
    if names:
        yield names, _weighted_sums(pieces, starts)


def _weighted_sums(pieces: list[Tensor], starts: list[int]) -> Tensor:
    """For each piece the sum of its words, each times an odd number that depends on its place in its tensor."""
    device = pieces[0].device
    sizes = torch.tensor([piece.numel() for piece in pieces])
    ends = sizes.cumsum(0)
    offsets = torch.tensor(starts) - (ends - sizes)
    sizes, ends, offsets = sizes.to(device), ends.to(device), offsets.to(device)
    words = torch.cat([piece.to(torch.int64) for piece in pieces])
    place = torch.arange(len(words), device=device) + offsets.repeat_interleave(sizes, output_size=len(words))
    # int64 products and sums wrap, which is what a hash wants.
    weight = place.mul_(0x9E3779B97F4A7C1).add_(0x5851F42D4C957F2D).bitwise_or_(1)
    running = words.mul_(weight).cumsum(0)
    return torch.diff(running[ends - 1], prepend=running.new_zeros(1))
