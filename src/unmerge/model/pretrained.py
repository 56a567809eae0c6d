"""A checkpoint of transformers by the names of the model, which the library changes for some models on loading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.errors import FileError
from unmerge.storage.files import read_json

CONFIG = "config.json"


def is_alike(model: nn.Module, directory: Path) -> bool:
    """Whether a directory holds a model of the same kind as this one of transformers."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None or not hasattr(model, "from_pretrained") or not (directory / CONFIG).is_file():
        return False
    config = read_json(directory / CONFIG, "configuration of a model")
    return isinstance(config, dict) and config.get("model_type") == kind


def as_loaded(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, on the CPU, by the names that models like this one have, without what it lacks."""
    kind: Any = type(model)
    try:
        with _quiet(), torch.random.fork_rng(devices=[]):  # what the checkpoint lacks is drawn
            loaded, info = kind.from_pretrained(directory, local_files_only=True, output_loading_info=True)
    except Exception as error:  # transformers raises many kinds for a damaged directory
        raise FileError(f"{directory} cannot be loaded as a {kind.__name__}: {error}") from error
    return {name: tensor for name, tensor in loaded.state_dict().items() if name not in info["missing_keys"]}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress and its report of what is missing, which is told elsewhere."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
