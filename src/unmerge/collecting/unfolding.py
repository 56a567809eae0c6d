"""The inputs of a layer as rows, one for each place where its weight matrix is applied."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from unmerge.placement.offloading import parameter_of

# Elements of unfolded input that exist at one time.
CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}


def rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Rows as (samples, positions, features), or (groups, samples, positions, features) when grouped.

    `rows @ weight_matrix.mT + bias` is what the module returns.
    """
    if not isinstance(module, nn.Conv2d):
        inputs = inputs.reshape(1, -1) if inputs.dim() == 1 else inputs
        return inputs.reshape(inputs.shape[0], math.prod(inputs.shape[1:-1]), inputs.shape[-1])
    patches = _patches(module, _padded(module, _batched(inputs)))  # the reshape makes the one copy
    groups, samples, high, wide, *_ = patches.shape
    unfolded = patches.reshape(groups, samples, high * wide, math.prod(patches.shape[-3:]))
    return unfolded if groups > 1 else unfolded[0]


def rows_taps_first(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """The rows of a convolution without groups, features ordered (height, width, channel) as channels-last images are.

    A GPU copies them in pieces of eight bytes, several times as fast as by single channels.
    """
    image = _padded(module, _batched(inputs)).permute(0, 2, 3, 1).contiguous()
    pieces = image.view(torch.int64).permute(0, 3, 1, 2)
    unfolded = _patches(module, pieces)[0].movedim(3, -1).clone(memory_format=torch.contiguous_format)
    return unfolded.flatten(1, 2).flatten(2).view(image.dtype)


def can_be_taps_first(module: nn.Module, inputs: Tensor) -> TypeGuard[nn.Conv2d]:
    """Whether rows in that order are quick to make."""
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or not inputs.is_cuda or inputs.dim() != 4:
        return False
    fits = module.in_channels % 4 == 0 and math.prod(module.kernel_size) > 1
    return fits and inputs.is_contiguous(memory_format=torch.channels_last)


def channels_first(module: nn.Conv2d) -> Tensor:
    """The places among features that stand taps first of those in the order of the weight."""
    taps = math.prod(module.kernel_size)
    return torch.arange(taps * module.in_channels).view(taps, module.in_channels).mT.flatten()


def _patches(module: nn.Conv2d, image: Tensor) -> Tensor:
    """A view (groups, samples, height, width, channels, *kernel) in which every place of the output sees its patch."""
    samples, channels = image.shape[:2]
    (high, wide), (down, right), (rise, run) = module.kernel_size, module.stride, module.dilation
    out_height, out_width = _places(module, image)
    groups = module.groups
    by_sample, by_channel, by_row, by_column = image.stride()
    return image.as_strided(
        (groups, samples, out_height, out_width, channels // groups, high, wide),
        (
            by_channel * (channels // groups),
            by_sample,
            by_row * down,
            by_column * right,
            by_channel,
            by_row * rise,
            by_column * run,
        ),
        image.storage_offset(),
    )


def chunks(module: nn.Module, inputs: Tensor, taps_first: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """The rows of some samples at a time, so that unfolding needs bounded memory."""
    if not isinstance(module, nn.Conv2d):
        yield slice(None), rows(module, inputs)
        return
    inputs, unfold = _batched(inputs), rows_taps_first if taps_first else rows
    one = unfold(module, inputs[:1])
    size = max(1, CHUNK["cuda" if inputs.is_cuda else "cpu"] // max(1, one.numel()))
    for start in range(0, len(inputs), size):
        part = slice(start, start + size)
        yield part, unfold(module, inputs[part])


def geometry(module: nn.Module) -> tuple[object, ...]:
    """What two modules must share, beside their input, to have the same rows."""
    if not isinstance(module, nn.Conv2d):
        return ("linear",)
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    # Some subclasses keep lists.
    return (*(size if isinstance(size, str) else tuple(size) for size in sizes), module.groups, module.padding_mode)


def _places(module: nn.Conv2d, image: Tensor) -> tuple[int, int]:
    """Height and width of the convolution's output for a padded image."""
    extents = zip(image.shape[-2:], module.kernel_size, module.stride, module.dilation, strict=True)
    high, wide = ((size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, dilation in extents)
    return high, wide


def _batched(inputs: Tensor) -> Tensor:
    return inputs.unsqueeze(0) if inputs.dim() == 3 else inputs


def _padded(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    sides: list[int] = []
    for axis in (1, 0):  # functional.pad wants the last dimension first
        if module.padding == "valid":
            before = after = 0
        elif module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = int(module.padding[axis])
        sides += [before, after]
    if not any(sides):
        return inputs
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(inputs, sides, mode=mode)


def _bias(module: nn.Module, inputs: Tensor) -> Tensor:
    return parameter_of(module, "bias").to(inputs.device, torch.float64)


def agrees(module: nn.Module, inputs: Tensor, output: Tensor, matrix: Tensor) -> bool:
    """Whether (rows) · (weight matrix) + bias is what the module returned, up to the rounding of its type."""
    if isinstance(module, nn.Conv2d):
        inputs, output = _batched(inputs)[:2], _batched(output)[:2]
        if _places(module, _padded(module, inputs)) != output.shape[-2:]:
            return False
    matrix = matrix.to(inputs.device)
    found = rows(module, inputs).double() @ (matrix.unsqueeze(1) if matrix.dim() == 3 else matrix).double().mT
    if isinstance(module, nn.Conv2d):
        if found.dim() == 4:
            found = found.permute(1, 0, 3, 2).reshape(len(inputs), -1, found.shape[2])
        else:
            found = found.mT
        expected = output.double().flatten(2)
        bias = None if module.bias is None else _bias(module, inputs).unsqueeze(-1)
    else:
        expected = output.double().reshape(-1, output.shape[-1])
        found = found.reshape(-1, found.shape[-1])
        bias = _bias(module, inputs) if getattr(module, "bias", None) is not None else None
    if found.shape != expected.shape:
        return False
    found = found if bias is None else found + bias
    if not found.isfinite().all():
        return True  # not the layer's doing: the pass names the first layer with such inputs
    tolerance = 1e-2 if output.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found - expected).norm() <= tolerance * expected.norm() + 1e-6)
