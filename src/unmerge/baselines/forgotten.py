"""Which classes a request forgets: those of its forget labels that retain does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.samples import Data, check_labels, class_count, labels_in
from unmerge.data.batches import Forward, batches, class_labels, first_batch
from unmerge.errors import DataError, listing


def forgotten_classes(
    model: nn.Module, forget: Data, retain: Data | None, classes: Sequence[int] | None, forward: Forward | None
) -> list[int]:
    """The forgotten classes in ascending order: those given, or those of forget's labels that retain has not."""
    width = class_count(model, first_batch(forget, "forget"), forward)
    if classes is not None:
        found = class_labels(classes)
    elif retain is None:
        raise DataError("retain is needed to see which classes only forget has. Pass it, or classes=[...].")
    else:
        wanted, kept = (set(_labels(data, what).tolist()) for data, what in ((forget, "forget"), (retain, "retain")))
        found = sorted(wanted - kept)
        if not found:
            raise DataError(
                f"retain has samples of every forget class ({listing(map(str, sorted(wanted)))}), so there is none to "
                "take out. Pass classes=[...] to take some out all the same."
            )
    check_labels(torch.tensor(found), width)
    if len(found) == width:
        raise DataError(f"all {width} classes of the model would be taken out; leave at least one to predict.")
    return found


def _labels(data: Data, what: str) -> Tensor:
    seen: list[Any] = [labels_in(batch, what).cpu() for batch in batches(data, what)]
    if not sum(map(len, seen)):
        raise DataError(f"{what}: the batches hold no sample. Expected at least one.")
    return torch.cat(seen).unique()
