"""The command as torchrun starts it, in two real processes: one answer, one set of files, one error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import check_close
from safetensors.torch import save_file
from torch import nn

from unmerge import Edit, Statistics
from unmerge.bench.digits import load_digits
from unmerge.cli import main

SOURCE = Path(__file__).parents[2] / "src"
MODELS = """
import os
import signal
import time
from datetime import timedelta

from torch import nn
from unmerge.distributed import messages

class Network(nn.Sequential):
    def forward(self, images):
        self.calls = getattr(self, "calls", 0) + 1
        how = os.environ.get("AT_FOUR", "go on") if self.calls == 4 else "go on"
        if how == "fail while the first is busy":
            messages.PATIENCE = timedelta(seconds=1)
            time.sleep(20 if os.environ["RANK"] == "0" else 0)
        if os.environ.get("RANK") == "1" and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RANK") == "1" and how.startswith("fail"):
            raise OSError("the disk is gone")
        return super().forward(images)

def build():
    print("built")
    return Network(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 10),
    )
"""
MODEL = ("--model", "few_models:build", "--weights", "w.safetensors")
FORGET = ("--data", "digits.npz", "--forget", "label=3", "--batch-size", "16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits, trained for a moment, and the digits."""
    place = tmp_path_factory.mktemp("command")
    split, _ = load_digits()
    images, labels = split.images[:200], split.labels[:200]
    np.savez(place / "digits.npz", images=images.numpy(), labels=labels.numpy())
    (place / "few_models.py").write_text(MODELS)
    names: dict[str, Any] = {}
    exec(MODELS, names)
    torch.manual_seed(0)
    model: nn.Module = names["build"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    save_file(model.state_dict(), place / "w.safetensors")
    return place


def in_two(folder: Path, *arguments: str, **around: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    around |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, "-m", "unmerge", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **around}, capture_output=True, text=True, timeout=120
    )


def in_one(folder: Path, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main(arguments) == 0


def names_in(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_run_gives_the_edit_of_one_process_and_its_files(folder: Path) -> None:
    in_one(folder, "run", *MODEL, *FORGET, "--out", "one")
    before = names_in(folder)
    done = in_two(folder, "run", *MODEL, *FORGET, "--out", "two", "--json")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert json.loads(line)["out"] == "two"
    assert done.stderr.count("built") == 1  # what the user's function prints in the other process is not heard
    assert names_in(folder) - before == {"two", *(f"two/{name}" for name in names_in(folder / "one"))}
    one, two = (Edit.load(folder / name / "edit") for name in ("one", "two"))
    assert one.layers.keys() == two.layers.keys()
    for name, layer in one.layers.items():
        other, change = two.layers[name], layer.B @ layer.Q.mT
        assert (change - other.B @ other.Q.mT).norm() <= 1e-5 * change.norm()


def test_collect_counts_every_sample_once(folder: Path) -> None:
    done = in_two(folder, "collect", *MODEL, "--data", "digits.npz", "--batch-size", "16", "--out", "all.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["built", "all.safetensors: 200 samples, 3 layers"]
    in_one(folder, "collect", *MODEL, "--data", "digits.npz", "--batch-size", "16", "--out", "own.safetensors")
    found, expected = (Statistics.load(folder / f"{name}.safetensors") for name in ("all", "own"))
    assert found.class_samples == expected.class_samples
    for name, layer in expected.layers.items():
        torch.testing.assert_close(found[name].moments.mean, layer.moments.mean, rtol=1e-5, atol=1e-6)
        assert found[name].moments.n == layer.moments.n


def test_evaluate_gives_the_figures_of_one_process(folder: Path) -> None:
    model = ("--model", "few_models:build@w.safetensors", "--axes", "accuracy,calibration", "--out")
    in_one(folder, "evaluate", *model, "one.json", *FORGET)
    done = in_two(folder, "evaluate", *model, "two.json", *FORGET)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((folder / f"{name}.json").read_text())["tables"] for name in ("one", "two"))
    check_close(two, one, 1e-5)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fail", "error: process 1 of 2 failed, so this one ends too: OSError: the disk is gone"),
        ("die", "error: process 1 of 2 has ended, or has not answered in time"),
    ],
    ids=["fail", "die"],
)
def test_one_process_that_ends_ends_all_with_one_error(folder: Path, how: str, said: str) -> None:
    before = names_in(folder)
    done = in_two(folder, "run", *MODEL, *FORGET, "--out", "none", AT_FOUR=how)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    # A launcher that is quicker than the word of the process that fails ends the first one itself.
    assert len(errors) == 1
    assert errors[0].startswith((said, "error: interrupted, or another process has ended"))
    assert {name for name in names_in(folder) - before if not name.startswith(".none.resume")} == set()


def test_a_failure_that_the_first_process_does_not_hear_of_is_said_all_the_same(folder: Path) -> None:
    done = in_two(folder, "run", *MODEL, *FORGET, "--out", "none", AT_FOUR="fail while the first is busy")
    assert done.returncode != 0
    assert "error: the disk is gone" in done.stderr.splitlines()


def test_what_is_typed_wrong_is_said_once(folder: Path) -> None:
    done = in_two(folder, "run", *MODEL, *FORGET, "--out", "none", "--basis", "ldx")
    assert done.returncode != 0
    assert done.stderr.count("Did you mean 'lda'") == 1


def test_a_command_without_passes_is_the_first_process_s(folder: Path) -> None:
    done = in_two(folder, "bench")
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("engine ")]) == 1
