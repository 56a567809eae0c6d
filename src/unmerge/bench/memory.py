"""Time and peak memory of a request on a language model within a bound, on random weights and texts.

    python -m unmerge.bench.memory                                      # a small shape, two CPU cores, seconds
    python -m unmerge.bench.memory --device cuda --shape llama-8b       # Llama-3.1-8B's shape in bf16

The bound is for statistics and linear algebra beside the weights and the activations of a plain forward pass, both of
which are measured first. The exit status is 1 where the peak goes past what the plan had said.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unmerge
from unmerge.bench.machine import machine_name
from unmerge.model.evaluating import evaluating
from unmerge.planning.plans import in_words

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 1000},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
# What fits beside the weights on a card of 16, 24 and 40 GB, and the size of the request.
DEFAULTS: dict[str, dict[str, Any]] = {
    "small": {"memory": "150MB", "layers": "mlp:last4", "pairs": 30, "forget": 6, "batch": 6},
    "llama-1b": {"memory": "10GB", "layers": "mlp:last8", "pairs": 4000, "forget": 400, "batch": 32},
    "llama-8b": {"memory": "21GB", "layers": "mlp:last16", "pairs": 4000, "forget": 400, "batch": 32},
}
TOKENS = (64, 128)  # of a text, from and to
ALLOCATOR = {"cpu": 48_000_000, "cuda": 10**9}  # bytes of rows in flight, libraries and unused pieces of blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", help="the bound, for example 20GB (default: by shape)")
    parser.add_argument("--layers", help="which layers are edited (default: by shape)")
    parser.add_argument("--basis", default="wiener", help="of the recipe (default: wiener)")
    parser.add_argument("--pairs", type=int, help="texts in all (default: by shape)")
    parser.add_argument("--forget", type=int, help="texts to forget, a part of all (default: by shape)")
    parser.add_argument("--batch", type=int, help="texts a batch (default: by shape)")
    parser.add_argument("--init", choices=["zero", "state-dict"], default="zero", help="state-dict: on the CPU")
    parser.add_argument("--on-verdict", choices=["warn", "ignore"], default="warn", help="ignore: without a control")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.shape].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    device = torch.device(options.device)
    request = f"{options.shape}, {options.layers}, {options.basis}, {options.pairs:,} texts"
    print(f"{request}, {machine_name(device)}, torch {torch.__version__}")
    raise SystemExit(0 if measure(options, device) else 1)


def measure(options: argparse.Namespace, device: torch.device) -> bool:
    """Print what a request takes; whether it stayed within what its plan had said."""
    model = random_llama(SHAPES[options.shape], device)
    forget = texts(options.forget, options.batch, seed=0, words=(3, 20))
    retain = texts(options.pairs - options.forget, options.batch, seed=1, words=(20, model.config.vocab_size))
    recipe = unmerge.Recipe(basis=options.basis, layers=options.layers)
    init = "zero" if options.init == "zero" else earlier_weights(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with peak_of(device) as activations:
        start = time.perf_counter()
        with evaluating(model):
            for batch in forget:
                model(**{name: value.to(device) for name, value in batch.items()})
        synchronize(device)
        plain = time.perf_counter() - start
    plan = unmerge.plan(model, recipe, options.memory, forget)
    print(f"\n{plan}\n")
    with peak_of(device) as peak:
        start = time.perf_counter()
        edit = unmerge.fit(
            model, forget, retain, init=init, recipe=recipe, memory=options.memory, on_verdict=options.on_verdict
        )
        synchronize(device)
        seconds = time.perf_counter() - start
    taken = peak[0] - activations[0]
    print(f"weights                        {in_words(weights)}")
    print(f"activations of a forward pass  {in_words(activations[0])}")
    print(f"statistics and linear algebra  {in_words(max(0, taken))}   the plan said {in_words(plan.bytes)}")
    print(f"peak in all                    {in_words(weights + peak[0])}")
    print(f"plain forward over forget      {plain:.2f} s for {options.forget:,} of {options.pairs:,} texts")
    print(f"request                        {seconds:.2f} s in {len(plan.groups)} passes: {edit.provenance['seconds']}")
    return taken <= plan.bytes + ALLOCATOR[device.type]


def random_llama(shape: dict[str, int], device: torch.device) -> Any:
    """A Llama of this shape with random weights: bf16 on a GPU, float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    finally:
        torch.set_default_dtype(before)


def texts(count: int, size: int, seed: int, words: tuple[int, int]) -> list[dict[str, Tensor]]:
    """Padded batches of random words from one range of the vocabulary, texts of like length together."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(TOKENS[0], TOKENS[1] + 1, (count,), generator=generator)
    batches = []
    for part in lengths.sort().values.split(size):
        ids = torch.randint(*words, (len(part), int(part.max())), generator=generator)
        mask = (torch.arange(ids.shape[1]) < part.unsqueeze(1)).long()
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def earlier_weights(model: nn.Module) -> dict[str, Tensor]:
    """A state dict on the CPU near the model's, as fine-tuning would have started from."""
    return {
        name: (0.9 * parameter.detach()).cpu() for name, parameter in model.named_parameters() if parameter.dim() > 1
    }


@contextmanager
def peak_of(device: torch.device) -> Iterator[list[int]]:
    """A list that holds, after the block, the most bytes that it had taken beside what was there before."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    yield found
    found.append(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Bytes of this process that the kernel shows under a field, on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
