"""Tiny causal language models of transformers: random, seeded, in eval mode, nothing downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 23

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}
KINDS = (*_KINDS, "gpt2")


def decoder(
    kind: str, blocks: int = 3, tied: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> nn.Module:
    """A model of one kind whose weights are drawn from `seed`."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=8, n_inner=12, n_layer=blocks, n_head=2, n_positions=32,
            bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
        )  # fmt: skip
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        if kind == "mixtral":
            options = {"num_local_experts": 4, "num_experts_per_tok": 2, **options}
        make_config, make_model = _KINDS[kind]
        config = make_config(**{**_SIZES, "num_hidden_layers": blocks, "tie_word_embeddings": tied, **options})
        model = make_model(config)
        if dtype == torch.float64:
            model.config._experts_implementation = "eager"  # the grouped product knows no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


def sentences(lengths: Sequence[int], seed: int = 0, low: int = 3, high: int = VOCABULARY) -> list[Tensor]:
    """Random token ids, one sentence of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (length,), generator=generator) for length in lengths]


def padded(texts: Sequence[Tensor], side: str = "right", extra: int = 0) -> dict[str, Tensor]:
    """One batch of sentences, padded to the longest and `extra` more, with the positions that belong to it."""
    width = max(map(len, texts)) + extra
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        ids[row, place], mask[row, place] = text, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
