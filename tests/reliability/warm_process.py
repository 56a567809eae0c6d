"""A process with everything imported: each line on stdin is a task for a fork of it, which is killed where it says.

A task: {"folder", "arguments" of the command or "checkpoint" (arguments of edit_checkpoint), and one of "operation"
(die before the n-th change of a file), "seconds" (die after them) or "together" (arguments of a second command, started
at the same time)}. The answer: {"code", "others", "operations", "samples" (that went through a model), "seconds"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from tqdm.auto import tqdm

import unmerge.storage.files
from unmerge import Edit, collect
from unmerge.cli import application, main  # noqa: F401 (imported before the first fork)
from unmerge.interop.checkpoints import edit_checkpoint

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def carry_out(task: dict[str, Any], counted: Path) -> NoReturn:
    """Do a task in this process and end it, whatever happens."""
    code = 1
    try:
        os.chdir(task["folder"])
        silence = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        operations, samples = count_changes(task.get("operation")), count_samples()
        if "checkpoint" in task:
            source, edit, alpha, target = task["checkpoint"]
            edit_checkpoint(source, Edit.load(edit), alpha, target)
            code = 0
        else:
            code = main(task["arguments"])
        counted.write_text(json.dumps({"operations": operations, "samples": sum(samples)}))
    finally:
        os._exit(code)


def count_changes(last: int | None) -> list[str]:
    """A list that grows with every change of a file; before the `last` of them the process is killed."""
    seen: list[str] = []

    def is_last(event: str) -> bool:
        seen.append(event)
        return len(seen) == last

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING)
        if is_change and is_last(event):
            os.kill(os.getpid(), signal.SIGKILL)

    def save(tensors: Any, path: Path, metadata: Any = None) -> None:
        # Of what is written outside of Python a half: as a kill in the middle of it leaves.
        if is_last("save"):
            raw = safetensors.torch.save(tensors, metadata)
            path.write_bytes(raw[: len(raw) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        safetensors.torch.save_file(tensors, path, metadata)

    unmerge.storage.files.save_file = save  # type: ignore[assignment]
    sys.addaudithook(hook)
    return seen


def count_samples() -> list[int]:
    """A list that grows by the size of every batch that a model gets."""
    seen: list[int] = []

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Sequential):  # the whole model, not a layer of it
            seen.append(len(inputs[0]))

    register_module_forward_pre_hook(hook)
    return seen


def beside(task: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**task, "arguments": task["together"]}] if "together" in task else []


def started(task: dict[str, Any], counted: Path) -> int:
    """The number of a new process that carries out a task."""
    child = os.fork()
    if child == 0:
        # The lock of progress bars is shared by forks: one that is killed while it holds it would stop all after it.
        tqdm.set_lock(threading.RLock())
        carry_out(task, counted)
    return child


def serve() -> None:
    torch.set_num_threads(1)
    collect(torch.nn.Sequential(torch.nn.Linear(2, 2)), [torch.eye(2)])  # what torch imports only now, no fork has to
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "operations"
        for line in sys.stdin:
            task = json.loads(line)
            counted.unlink(missing_ok=True)
            start = time.perf_counter()
            # Each has a file of its own to count in: two that end together would write over each other.
            child = started(task, counted)
            others = [started(other, counted.with_suffix(".beside")) for other in beside(task)]
            if task.get("seconds") is not None:
                time.sleep(task["seconds"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            answer = {
                "code": code,
                "others": [os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others],
                **(json.loads(counted.read_text()) if code == 0 else {}),
                "seconds": time.perf_counter() - start,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
