"""A folder with a tiny model and digits, and a warm process that runs commands there and kills them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability_place import MODELS, TESTS, Task, trained
from safetensors.torch import save_file

from unmerge.bench.digits import load_digits


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_models.py, w.safetensors, digits.npz and other.npz, as a person would have them."""
    place = tmp_path_factory.mktemp("reliability")
    split, _ = load_digits()
    for name, chosen in (("digits", slice(0, 150)), ("other", slice(150, 250))):
        np.savez(place / f"{name}.npz", images=split.images[chosen].numpy(), labels=split.labels[chosen].numpy())
    (place / "tiny_models.py").write_text(MODELS)
    save_file(trained(split.images[:250], split.labels[:250]).state_dict(), place / "w.safetensors")
    return place


@pytest.fixture(scope="session")
def task(folder: Path) -> Iterator[Task]:
    """Carries out a command in a process of its own that may be killed; returns how it ended."""
    around = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "reliability" / "warm_process.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=around) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def carry_out(*arguments: object, **how: Any) -> dict[str, Any]:
            asked = {"folder": str(folder), "arguments": list(map(str, arguments)), **how}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            return dict(json.loads(process.stdout.readline()))

        yield carry_out
        process.stdin.close()
