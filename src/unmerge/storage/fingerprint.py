"""Checksums of tensors, the same on every device: do these weights equal those the statistics were read from?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from unmerge.errors import FileError
from unmerge.placement.offloading import Offloaded
from unmerge.placement.sharded import is_split, whole

_CHECKSUM = re.compile(r"(?P<dtype>\w{1,20})\[(?P<sizes>(\d{1,18}(, \d{1,18}){0,15})?)\]:[0-9a-f]{16}")
_CHUNK = 1 << 20
_WHOLE_WORDS = (torch.float32, torch.float64, torch.int32, torch.int64)
_SMALL = {"cpu": 1 << 14, "cuda": 1 << 20}  # up to which many tensors are summed in one go: there, each call costs more


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A checksum a tensor: its type, shape and a 64-bit sum of its bits, each weighted by its place."""
    placed = tensors.placed if isinstance(tensors, Offloaded) else tensors
    apart = [name for name, tensor in placed.items() if is_split(tensor) or (placed is not tensors and tensor.is_meta)]
    if apart:
        found = fingerprint({name: placed[name] for name in placed if name not in set(apart)})
        for name in apart:  # one at a time: all of them may not fit
            found |= fingerprint({name: whole(tensors[name].detach())})
        return {name: found[name] for name in tensors}
    sums = dict.fromkeys(tensors, 0)
    with torch.no_grad():
        for device in {tensor.device for tensor in tensors.values()}:
            parts, totals = [], []
            for names, totalled in _chunk_sums({name: each for name, each in tensors.items() if each.device == device}):
                parts += names
                totals.append(totalled)
            # One transfer a device instead of one a tensor.
            for name, value in zip(parts, torch.cat(totals).tolist() if totals else [], strict=True):
                sums[name] += value
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{sums[name] & (2**64 - 1):016x}"
        for name, tensor in tensors.items()
    }


def kind_of(checksum: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """The type and shape of the tensor that a checksum is of."""
    found = _CHECKSUM.fullmatch(checksum)
    dtype = None if found is None else getattr(torch, found["dtype"], None)
    if found is None or not isinstance(dtype, torch.dtype):
        raise FileError(f"{checksum[:100]!r} is no checksum of a tensor.")
    return dtype, tuple(int(size) for size in found["sizes"].split(",") if size)


def differences(found: Mapping[str, str], expected: Mapping[str, str], names: Iterable[str] | None = None) -> list[str]:
    """The names, in order, whose checksums are not the same or that stand on one side only."""
    keys = list(dict.fromkeys([*expected, *found])) if names is None else list(names)
    return [name for name in keys if found.get(name) != expected.get(name)]


def _chunk_sums(tensors: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Weighted sums of pieces of at most a chunk, many small tensors in one go."""
    small: dict[torch.dtype | None, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if _word_count(tensor) <= _SMALL.get(tensor.device.type, 1 << 14):
            small[tensor.dtype if tensor.dtype in _WHOLE_WORDS else None][name] = tensor
            continue
        words, table = _words(tensor), _weights(tensor.device)
        pieces = words.split(_CHUNK)
        # int64 products and sums wrap, which is what a hash wants. Each piece counts differently.
        sums = [(2 * place + 1) * (piece * table[: len(piece)]).sum() for place, piece in enumerate(pieces)]
        yield [name] * len(pieces), torch.stack(sums)
    for dtype, group in small.items():
        if dtype is None:
            parts = [_words(tensor) for tensor in group.values()]
            yield list(group), _small_sums(torch.cat(parts).to(torch.int64), [len(part) for part in parts])
        else:  # a call a tensor, since these are most of a network's
            flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in group.values()]
            words = torch.cat(flat).view(torch.int32)
            yield list(group), _small_sums(words.to(torch.int64), [tensor.nbytes // 4 for tensor in group.values()])


def _word_count(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.nbytes % 4 else tensor.nbytes // 4


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers: of four bytes each, or of one where those do not come out even."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 4:
        return raw
    # A view that begins between two words is copied to where words begin.
    return (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.int32)


def _small_sums(words: Tensor, sizes: list[int]) -> Tensor:
    """The weighted sum of each of many small tensors, whose words lie behind each other, with a few operations."""
    device, counts = words.device, torch.tensor(sizes)
    ends = counts.cumsum(0)
    starts = (ends - counts).to(device).repeat_interleave(counts.to(device), output_size=int(ends[-1]))
    place = torch.arange(len(starts), device=device) - starts
    running = words.mul_(_weights(device)[place]).cumsum(0)
    # An empty tensor ends where the one before it ends.
    totals = torch.cat([running.new_zeros(1), running])[torch.cat([ends.new_zeros(1), ends]).to(device)]
    return totals.diff()


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    """An odd number for each place in a chunk."""
    place = torch.arange(_CHUNK, device=device)
    return place.mul_(0x9E3779B97F4A7C1).add_(0x5851F42D4C957F2D).bitwise_or_(1)
