"""The small shape of the memory benchmark stays within the bound that is stated for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CLEARABLE = os.access("/proc/self/clear_refs", os.W_OK)


@pytest.mark.skipif(not CLEARABLE, reason="the peak of a process is measured by way of Linux's /proc")
def test_a_request_in_passes_takes_no_more_than_its_bound():
    # A process of its own, since memory that others freed would hide what is taken. One arena, no growing threshold:
    # what is freed goes back, so that the resident size is what is held.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "unmerge.bench.memory", "--init", "state-dict"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passes = int(re.search(r"^(\d+) passes", done.stdout, re.MULTILINE)[1])
    assert passes > 1
    found = re.search(r"linear algebra +([\d.]+) ([MG])B +the plan said ([\d.]+) ([MG])B", done.stdout).groups()
    taken, said = (float(number) * {"M": 1e6, "G": 1e9}[unit] for number, unit in (found[:2], found[2:]))
    assert 0.05e9 < taken < 0.2e9
    assert 0.1e9 < said <= 0.17e9
