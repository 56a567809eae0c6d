"""Statistics from an earlier pass that are named for a request: whether they are of its model and of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmerge.cli.data import Folder
from unmerge.cli.parts import Part, Source
from unmerge.cli.requests import Requested
from unmerge.cli.work import Job
from unmerge.collecting.merging import Shard, shard_in
from unmerge.collecting.statistics import Statistics
from unmerge.errors import StatisticsError
from unmerge.placement.state import state_of
from unmerge.requests.gathering import needed_of
from unmerge.storage.fingerprint import fingerprint


def named_statistics(path: Path, job: Job) -> Statistics:
    """The statistics in a file, where they are of all the data of the request; where it does not say, they are."""
    shard = shard_in(path)
    if shard is not None:
        _check_data(path, shard, job)
    found = Statistics.load(path)
    found.check_weights(fingerprint(state_of(job.model.module)))
    return found


def data_read(job: Job) -> Shard | None:
    """What the statistics of all that the request reads are of, for the next request that names them."""
    source = _source(job.request)
    if source is None or source.identity is None:
        return None
    return Shard(1, 1, source.identity, needed_of(job.recipe).get("per_class", "means"))


def _check_data(path: Path, shard: Shard, job: Job) -> None:
    if shard.total > 1:
        raise StatisticsError(
            f"{path} is shard {shard.number} of {shard.total}; merge them: unmerge merge-stats FILES --out "
            "all.safetensors, with the files of all shards, and pass --statistics all.safetensors."
        )
    asked = data_read(job)
    if asked is None or asked.data == shard.data:
        return
    found = f"{path} was collected from other data than --data, or from data that were prepared otherwise"
    if isinstance(_source(job.request), Folder):
        # Its checksum holds times of change, which a copy need not keep.
        job.output.warn(f"{found}; or the files have since been written anew. Other data make a wrong edit.")
        return
    raise StatisticsError(
        f"{found}: what is forgotten would be subtracted from statistics that it is no part of. Leave --statistics "
        "out, or write them with `unmerge collect --data` of the same data and flags."
    )


def _source(request: Requested) -> Source | None:
    """What both parts are cut from; None for two sources, of which nobody knows what all the data are."""
    parts: Any = (request.forget, request.retain)
    if all(isinstance(part, Part) for part in parts) and parts[0].source is parts[1].source:
        return parts[0].source
    return None
