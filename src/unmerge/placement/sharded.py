"""Models whose weights are spread over the processes by FSDP2: each tensor is brought together when it is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, distributed, nn

from unmerge.errors import LayerError


def is_split(tensor: Tensor) -> bool:
    """Whether this process holds only a part of the tensor."""
    # What was never imported has made no tensor.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor in full; every process must ask for it."""
    split: Any = tensor
    return split.full_tensor() if is_split(tensor) else tensor


def split_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that all of them have, laid out as `like` is."""
    if not is_split(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    stored: Any = like
    return distribute_tensor(value, stored.device_mesh, stored.placements, src_data_rank=None)


def is_finite(tensor: Tensor) -> bool:
    """Whether all of a tensor is finite; of a split one every process must ask."""
    return bool(whole(tensor).isfinite().all())


class Whole(Mapping[str, Tensor]):
    """Tensors by name, each brought together when it is asked for: all at once would not fit one process."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def is_sharded(model: nn.Module) -> bool:
    """Whether the processes hold the model's weights in parts, so that each forward pass needs all of them."""
    return bool(_fsdp_modules(model))


def settle(model: nn.Module) -> None:
    """Put the parts back that a forward pass brought together: what is written to the whole would be lost."""
    for module in _fsdp_modules(model):
        module.reshard()


def check_model(model: nn.Module) -> None:
    """Refuse a model that several processes cannot read each at its own pace, or whose layers see parts of their input.

    A wrapper that talks to the other processes in every forward pass waits where these have no batch left.
    """
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel")
    found = next((type(module).__name__ for module in model.modules() if type(module).__name__ in wrappers), None)
    if found == wrappers[0]:
        raise LayerError("the model is wrapped in DistributedDataParallel. Pass what it wraps: model.module.")
    if found is not None:
        raise LayerError(
            f"the model is wrapped in {found}. Shard it with torch.distributed.fsdp.fully_shard instead, or pass it "
            "whole."
        )
    split = {name: parameter for name, parameter in model.named_parameters() if is_split(parameter)}
    for name, parameter in split.items():
        layout: Any = parameter
        if not is_sharded(model) or sum(placement.is_shard() for placement in layout.placements) > 1:
            raise LayerError(
                f"{name} is a DTensor laid out as {layout.placements}, as tensor parallelism does: its layer sees a "
                "part of its input. Load the model whole, with device_map='auto', or with fully_shard alone."
            )


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    return [module for module in model.modules() if isinstance(module, kind)]
