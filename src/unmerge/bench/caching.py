"""Names of what a benchmark keeps: what was made from other weights, or in another way, must not be taken for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unmerge.storage.fingerprint import fingerprint

_DIGITS = 8


def short_checksum(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """Eight digits that differ where a weight or a setting (plain values) does."""
    described = json.dumps([fingerprint(weights), settings], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:_DIGITS]


def file_checksum(path: Path) -> str:
    """Eight digits that differ where the bytes of a file do."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            found.update(piece)
    return found.hexdigest()[:_DIGITS]
