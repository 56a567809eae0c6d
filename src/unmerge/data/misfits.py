"""What to say of inputs that a model cannot take: theirs and its own words in one message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from torch import Tensor

from unmerge.errors import DataError, listing

# What layers and models raise themselves; subclasses of these mean memory, another process, or something of the user's.
KINDS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
_MACHINE = re.compile(r"(?i)out of memory|allocate memory|cuda|cudnn|cublas|\bhip\b|nccl")  # not of the inputs either
_LONGEST = 400  # characters of what a model says


def is_misfit(error: Exception) -> bool:
    """Whether what a model raised can be laid to the inputs that it was given."""
    return type(error) in KINDS and not _MACHINE.search(str(error))


def misfit(error: Exception, inputs: Any) -> DataError:
    """The error to raise from that of the model."""
    said = shorten(str(error), _LONGEST, placeholder=" ...").removesuffix(".") or "it gives no reason"
    return DataError(
        f"the model raised {type(error).__name__} when it was given {_described(inputs)}: {said}. Check "
        "that the data have the channels, size and type that the model was trained with, or pass forward= that feeds "
        "them in another way."
    )


def _described(inputs: Any) -> str:
    """The shapes and types of a model's inputs."""
    named = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    return listing(f"{name} of {_shape_or_kind(value)}" for name, value in named.items())


def _shape_or_kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} ({str(value.dtype).removeprefix('torch.')})"
    return f"type {type(value).__name__}"
