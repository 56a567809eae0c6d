"""The inputs of a layer as rows, one for each place where its weight matrix is applied."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from unmerge.offloading import parameter_of

# Elements of unfolded input that exist at one time.
CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}


def rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Rows as (samples, positions, features), or (groups, samples, positions, features) when grouped.

    `rows @ weight_matrix.mT + bias` is what the module returns.
    """
    if not isinstance(module, nn.Conv2d):
        inputs = inputs.reshape(1, -1) if inputs.dim() == 1 else inputs
        return inputs.reshape(inputs.shape[0], math.prod(inputs.shape[1:-1]), inputs.shape[-1])
    image = _padded(module, _batched(inputs))
    samples, channels = image.shape[:2]
    (high, wide), (down, right), (rise, run) = module.kernel_size, module.stride, module.dilation
    out_height, out_width = _places(module, image)
    groups = module.groups
    by_sample, by_channel, by_row, by_column = image.stride()
    # A view in which every place of the output sees its patch; the reshape makes the one copy.
    patches = image.as_strided(
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
    unfolded = patches.reshape(groups, samples, out_height * out_width, -1)
    return unfolded if groups > 1 else unfolded[0]


def chunks(module: nn.Module, inputs: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of some samples at a time, so that unfolding needs bounded memory."""
    if not isinstance(module, nn.Conv2d):
        yield slice(None), rows(module, inputs)
        return
    inputs = _batched(inputs)
    one = rows(module, inputs[:1])
    size = max(1, CHUNK["cuda" if inputs.is_cuda else "cpu"] // max(1, one.numel()))
    for start in range(0, len(inputs), size):
        part = slice(start, start + size)
        yield part, rows(module, inputs[part])


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
