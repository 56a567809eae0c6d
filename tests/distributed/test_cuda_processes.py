"""torchrun on GPUs: NCCL where each process has one of its own, gloo where they share it; the edit of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_work
import pytest
import torch
from comparing import check_close

TESTS = Path(__file__).parents[1]
GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def launched(count: int, gpus: int, folder: Path) -> list[dict[str, Any]]:
    """What each of `count` processes of torchrun found, which see so many GPUs."""
    places = [str(TESTS.parent / "src"), str(TESTS)]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")[:gpus]
    around = {"PYTHONPATH": os.pathsep.join(places), "CUDA_VISIBLE_DEVICES": ",".join(seen), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    script = str(TESTS / "distributed" / "cuda_work.py")
    done = subprocess.run(
        [*launcher, script, str(folder)], env={**os.environ, **around}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return cuda_work.results()


@pytest.mark.parametrize(
    ("count", "gpus", "backend"),
    [
        (1, 1, "nccl"),
        (2, 1, "gloo"),
        pytest.param(2, 2, "nccl", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
    ],
)
def test_processes_on_gpus_give_what_one_gives(
    count: int, gpus: int, backend: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    found = launched(count, gpus, tmp_path)
    for rank, own in enumerate(found):
        assert own["backend"] == backend
        assert own["device"] == f"cuda:{rank % gpus}"
        assert own["current"] == rank % gpus
        for total in own["sums"].values():
            assert (total == sum(range(1, count + 1))).all()
        check_close(own["results"], alone, 1e-5)
    for own in found[1:]:
        check_close(own["results"], found[0]["results"], 0.0)
