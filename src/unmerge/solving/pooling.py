"""What a request knows of a layer, one entry a group; a sketched layer's in coordinates of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from unmerge.requests.request import Request
from unmerge.solving.coordinates import in_coordinates
from unmerge.solving.pools import Pools


def pools_of(request: Request, layer: str) -> list[Pools]:
    """The pools that the bases of a layer are made from."""
    if request.statistics[layer].sketch is None:
        return pools_as_counted(request, layer)
    here, coordinates = in_coordinates(request, layer)
    return [Pools(here, layer, None, coordinates)]


def pools_as_counted(request: Request, layer: str) -> list[Pools]:
    """The pools of a layer as they were counted: of a sketched layer the means and variances alone."""
    groups = request.statistics[layer].groups
    if groups is None:
        return [Pools(request, layer, None)]
    # Depthwise layers have hundreds of problems with nine features: each is too small for a GPU.
    on_cpu = request.statistics[layer].device.type == "cpu"
    here = request if on_cpu else request.only(layer).with_each(lambda part: part.to("cpu"))
    return [Pools(here, layer, group) for group in range(groups)]


def retain_mean(request: Request, layer: str) -> Tensor:
    """m_R as (in,), or (groups, in)."""
    means = [pools.retain_mean for pools in pools_as_counted(request, layer)]
    return means[0] if request.statistics[layer].groups is None else torch.stack(means)
