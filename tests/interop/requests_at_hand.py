"""Edits of small models for the tests of interop, and what a model says to a few inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoders import decoder, padded, sentences
from networks import request
from unmerge import Edit, Recipe, fit

PLAIN = Recipe(basis="contrastive", rank=2, skip_layers=0, mean="free", head="edit")
BLOCKS = PLAIN.but(layers="re:layers|h\\.")
TEXTS = padded(sentences([7, 5, 6], seed=3))


def language_edit(model: nn.Module, recipe: Recipe = BLOCKS, **options: Any) -> Edit:
    """An edit that takes some sentences out of a language model."""
    forget, retain = ([padded(sentences([6, 7, 5, 8], seed=seed))] for seed in (1, 2))
    options = {"init": "zero", "on_verdict": "ignore", **options}
    return fit(model, forget, retain, recipe=recipe, **options)


def image_edit(model: nn.Module, shape: tuple[int, ...], recipe: Recipe = PLAIN, **options: Any) -> Edit:
    """An edit that takes class 0 out of a classifier."""
    dtype = next(model.parameters()).dtype
    forget, retain = request(shape, dtype=dtype)
    return fit(model, [forget], [retain], init="zero", recipe=recipe, **options)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


@torch.no_grad()
def logits(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return getattr(output, "logits", output).clone()


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def saved_decoder(directory: Path, kind: str = "llama", shards: bool = True, **options: Any) -> nn.Module:
    """A language model that was written as save_pretrained does, in several files or in one."""
    model: Any = decoder(kind, **options)
    model.save_pretrained(directory, max_shard_size="1KB" if shards else "1GB")
    return model
