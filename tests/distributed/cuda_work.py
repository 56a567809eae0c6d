"""A whole request on a GPU, for one process or, started by torchrun, for several: `cuda_work.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from networks import Batch, batched, cnn, samples
from unmerge import Recipe, collect, distributed, fit, search_alpha
from unmerge.distributed import messages
from unmerge.evaluation import evaluate


def results() -> dict[str, Any]:
    """What each stage gives with a model on the GPU and data on the CPU."""
    forget, retain = _batches([1] * 7, 2), _batches([0, 2, 3] * 8, 5, seed=4)
    model = _trained([*forget, *retain]).cuda()
    statistics = collect(model, retain, sample=20, seed=5)
    edit = fit(model, forget, retain, init="zero", recipe=Recipe(skip_layers=0, ridge=1.0))
    search = search_alpha(edit, model, forget, retain=retain, recalibrate=retain, score="kodge", max_alpha=2.0)
    splits = {"forget": forget, "retain": retain}
    evaluation = evaluate({"model": model}, None, splits, ["accuracy", "calibration"], draws=20, keep_features=0)
    assert all(layer.B.is_cuda for layer in edit.layers.values())
    found: dict[str, Any] = {f"{name} change": layer.B @ layer.Q.mT for name, layer in edit.layers.items()}
    found |= {f"{name} scatter": layer.moments.scatter for name, layer in statistics.layers.items()}
    found |= {f"{name} sample": layer.sample for name, layer in statistics.layers.items()}
    found |= {"samples": statistics.samples, "search": search.to_dict(), "tables": evaluation.to_dict()["tables"]}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def collectives(device: torch.device) -> dict[str, Any]:
    """What the processes send each other directly: words, and tensors of each kind from where they are."""
    place = dist.get_rank() + 1
    assert [entry["value"] for entry in messages.told({"value": place})] == list(range(1, dist.get_world_size() + 1))
    sums = {}
    for kind in (torch.float32, torch.float64, torch.int64):
        for where in (device, torch.device("cpu")):
            tensor = torch.full((5,), place, dtype=kind, device=where)
            group = None if tensor.is_cuda else messages.control_group()
            dist.all_reduce(tensor, group=group)
            dist.broadcast(tensor, src=0, group=group)
            sums[f"{kind} on {where.type}"] = tensor.cpu()
    return sums


def _batches(labels: list[int], size: int, seed: int = 0) -> list[Batch]:
    return batched(samples((3, 6, 6), labels, dtype=torch.float32, seed=seed, apart=1.5), size)


def _trained(batches: list[Batch]) -> nn.Module:
    """On the CPU, where every process gets the same bits."""
    model = cnn(dtype=torch.float32, seed=1)
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    here = distributed.start(timeout=60)
    answer = {
        "backend": dist.get_backend(),
        "device": str(here),
        "current": torch.cuda.current_device(),
        "sums": collectives(here),
        "results": results(),
    }
    torch.save(answer, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
