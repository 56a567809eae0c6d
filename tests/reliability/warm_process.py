"""A process with everything imported: each line on stdin is a task for a fork of it, which is killed where it says.

A task: {"folder", "arguments" of the command or "checkpoint" (arguments of edit_checkpoint), and one of "operation"
(die before the n-th change of a file) or "seconds" (die after them)}. The answer: {"code", "operations", "seconds"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

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
        silence = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        operations = count_changes(task.get("operation"))
        if "checkpoint" in task:
            source, edit, alpha, target = task["checkpoint"]
            edit_checkpoint(source, Edit.load(edit), alpha, target)
            code = 0
        else:
            code = main(task["arguments"])
        counted.write_text(str(len(operations)))
    finally:
        os._exit(code)


def count_changes(last: int | None) -> list[str]:
    """A list that grows with every change of a file; before the `last` of them the process is killed."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            seen.append(event)
            if len(seen) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


def serve() -> None:
    torch.set_num_threads(1)
    collect(torch.nn.Sequential(torch.nn.Linear(2, 2)), [torch.eye(2)])  # what torch imports only now, no fork has to
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "operations"
        for line in sys.stdin:
            task = json.loads(line)
            counted.unlink(missing_ok=True)
            start = time.perf_counter()
            child = os.fork()
            if child == 0:
                carry_out(task, counted)
            if task.get("seconds") is not None:
                time.sleep(task["seconds"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            answer = {
                "code": os.waitstatus_to_exitcode(status),
                "operations": int(counted.read_text()) if counted.exists() else None,
                "seconds": time.perf_counter() - start,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
