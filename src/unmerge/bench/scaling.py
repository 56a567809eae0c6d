"""Time and memory of a request against samples, width, layers and processes, one thread in each process.

    python -m unmerge.bench.scaling                  # on the CPU, a minute or two; --ranks 1 2 4 where there are cores
    python -m unmerge.bench.scaling --device cuda    # a GPU for each process

The network is a stack of linear layers of one width with random weights. "read" is the pass over forget and retain data
with what the processes then add up, "solve" the bases and coefficients, which every process computes for itself;
"memory" is the most that a process has taken for both beside the model and the data. Times are the best of three
requests; each row has processes of its own. Speed-up is that of "read" over one process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unmerge
from unmerge.bench.memory import peak_of, synchronize
from unmerge.distributed import start
from unmerge.distributed.processes import exchange
from unmerge.planning.plans import in_words
from unmerge.storage.files import write_json
from unmerge.tables import text_table

CLASSES = 10
BATCH = 256
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """What is varied."""

    samples: int
    width: int
    layers: int
    ranks: int


@dataclass(frozen=True)
class Cost:
    """What one case takes: of several processes the slowest, and the one with the most memory."""

    read: float  # seconds
    solve: float
    memory: int  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16384, help="of the smallest case (default: 16384)")
    parser.add_argument("--width", type=int, default=512, help="of the smallest case (default: 512)")
    parser.add_argument("--layers", type=int, default=4, help="of the smallest case (default: 4)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes (default: 1 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args()
    smallest = Case(options.samples, options.width, options.layers, 1)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{machine}, one thread a process, torch {torch.__version__}")
    found: dict[Case, Cost] = {}
    for case in cases(smallest, options.ranks):
        found[case] = measured(case, options.device)
        print(".", end="", flush=True)
    print(f"\n{table(found)}")
    if options.out is not None:
        write_json(options.out, [{**asdict(case), **asdict(cost)} for case, cost in found.items()])


def cases(smallest: Case, ranks: list[int]) -> Iterator[Case]:
    """The smallest case, then each number grown by itself; for the processes also a case of four times the samples."""
    yield smallest
    for factor in (2, 4):
        yield replace(smallest, samples=factor * smallest.samples)
    yield replace(smallest, width=2 * smallest.width)
    yield replace(smallest, layers=2 * smallest.layers)
    for count in ranks:
        if count > 1:
            yield replace(smallest, ranks=count)
            yield replace(smallest, samples=4 * smallest.samples, ranks=count)


def table(found: dict[Case, Cost]) -> str:
    rows = []
    for case, cost in found.items():
        alone = found.get(replace(case, ranks=1))
        gain = "" if alone is None or case.ranks == 1 else f"{alone.read / cost.read:.2f}x"
        sizes = [f"{case.samples:,}", str(case.width), str(case.layers), str(case.ranks)]
        rows.append([*sizes, f"{cost.read:.2f} s", f"{cost.solve:.2f} s", in_words(cost.memory), gain])
    return text_table(["samples", "width", "layers", "processes", "read", "solve", "memory", "speed-up"], rows)


def measured(case: Case, device: str) -> Cost:
    """Start the processes of a case, and bring back what they took."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "cost.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(_work, (case, device, port, result), nprocs=case.ranks)
        return Cost(**json.loads(result.read_text()))


def _work(rank: int, case: Case, device: str, port: int, result: Path) -> None:
    torch.set_num_threads(1)
    if case.ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(case.ranks)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    place = start()
    _request(replace(case, samples=2 * BATCH, width=64), place)  # loads what every request needs
    costs = [_request(case, place) for _ in range(REPEATS)]
    if rank == 0:
        read, solve = min(cost.read for cost in costs), min(cost.solve for cost in costs)
        # Later requests find the memory of the first ones free.
        write_json(result, asdict(Cost(read, solve, max(cost.memory for cost in costs))))


def _request(case: Case, device: torch.device) -> Cost:
    """The cost of one request, the same in every process."""
    model = _stack(case).to(device)
    inputs, labels = torch.randn(case.samples, case.width), torch.arange(case.samples) % CLASSES
    inputs += 0.5 * torch.eye(CLASSES, case.width)[labels]
    is_lost = labels == 0
    forget, retain = (
        DataLoader(TensorDataset(inputs[chosen], labels[chosen]), batch_size=BATCH) for chosen in (is_lost, ~is_lost)
    )
    exchange(None)  # all begin at once
    with peak_of(device) as peak:
        start = time.perf_counter()
        lost = unmerge.collect(model, forget)
        kept = unmerge.collect(model, retain, layers=lost)
        synchronize(device)
        read = time.perf_counter() - start
        unmerge.fit(model, lost, kept, init="zero", recipe=unmerge.Recipe(skip_layers=0))
        synchronize(device)
        solve = time.perf_counter() - start - read
    costs = exchange([read, solve, peak[0]])
    read, solve, memory = (max(column) for column in zip(*costs, strict=True))
    return Cost(read, solve, int(memory))


def _stack(case: Case) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(case.layers - 1):
        layers += [nn.Linear(case.width, case.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(case.width, CLASSES)).eval()


if __name__ == "__main__":
    main()
