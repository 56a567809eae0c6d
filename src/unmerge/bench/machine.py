"""Where a benchmark ran: what its results say of the machine."""

from __future__ import annotations

import platform

import torch

from unmerge.version import VERSION


def machine_name(device: torch.device | str) -> str:
    """The GPU, or how many threads of the CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def versions() -> dict[str, str]:
    """Those that results depend on."""
    return {"unmerge": VERSION, "torch": torch.__version__, "python": platform.python_version()}
