"""All tensors of a model, wherever they are kept."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from unmerge.placement.offloading import with_offloaded
from unmerge.placement.sharded import settle


def state_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Every parameter and buffer of a model, also what state_dict leaves out; offloaded ones are read when asked."""
    settle(model)
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    # One walk over the modules, as named_parameters and named_buffers make one each: it is a part of every request.
    for place, module in model.named_modules(remove_duplicate=False):
        prefix = f"{place}." if place else ""
        for found, own in ((parameters, module._parameters), (buffers, module._buffers)):
            found.update({prefix + name: tensor for name, tensor in own.items() if tensor is not None})
    return with_offloaded(model, parameters | buffers)
