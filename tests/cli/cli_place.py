"""What the tests of the command share: its result, its flags, and how digits and models are made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unmerge.bench.digits import Split

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COMMANDS = ("demo", "diagnose", "run", "collect", "merge-stats", "apply", "revert", "evaluate", "report", "bench")
SOURCE = Path(__file__).parents[2] / "src"
MODELS = """
import os
import signal

from torch import nn
from unmerge.bench.digits import load_digits, network

def build():
    return network()

class Interrupted(nn.Sequential):
    def forward(self, images):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == int(os.environ["CTRL_C_AT"]):
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(images)

def interrupted():
    return Interrupted(*network())

class Untouched(nn.Sequential):
    def forward(self, images):
        raise NotImplementedError("the model was called")

def untouched():
    return Untouched(*network())

def trained():
    from safetensors.torch import load_file
    model = network()
    model.load_state_dict(load_file("w.safetensors"))
    return model

def ignorant():
    model = network()
    model[-1].bias.data[0] = 100
    return model

def loader():
    images, _ = load_digits()
    return images.loader()

def strange():
    return 3
"""


@dataclass(frozen=True)
class Place:
    """A folder with everything that a person would have there."""

    folder: Path

    def __truediv__(self, name: str) -> Path:
        return self.folder / name


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        return dict(json.loads(lines[0]))


def train(model: nn.Module, split: Split, epochs: int, images: torch.Tensor) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(images) // 64))
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(64):
            output = model(images[chosen])
            logits = output if isinstance(output, torch.Tensor) else output.logits
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, split.labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def as_bytes(images: torch.Tensor) -> np.ndarray:
    return (images[:, 0] * 255).round().to(torch.uint8).numpy()


SMALL = ("--model", "models:build", "--weights", "w.safetensors")
RESNET = ("--model", "resnet", "--data", "images")
Command = Callable[..., Result]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
