"""Long jobs: flat memory, nothing left attached after an interruption, no thread left, the same seed the same edit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_place import trained
from torch import Tensor, nn

import unmerge
from unmerge.bench.digits import load_digits
from unmerge.cli.data import Folder
from unmerge.cli.images import preprocessing_of
from unmerge.cli.parts import Part
from unmerge.evaluation.passes import outputs

BATCHES = 10_000


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stream:
    """Ten thousand new batches, and the memory in use at some of them."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(BATCHES):
            if number in (BATCHES // 5, BATCHES - 1):
                self.seen[number] = resident()
            yield torch.randn(16, 128), torch.arange(16) % 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to measure memory")
def test_memory_stays_flat_over_ten_thousand_batches() -> None:
    model = nn.Sequential(nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 4))
    stream = Stream()
    found = unmerge.collect(model, stream, sample=100)
    assert found.samples == 16 * BATCHES
    first, last = stream.seen.values()
    # Eight thousand batches of 8 KiB are 64 MiB.
    assert last - first < 8 << 20


class Interrupted:
    """Batches of which one ends in Ctrl-C."""

    def __init__(self, batches: list[Any], at: int) -> None:
        self._batches, self._at = batches, at

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            if number == self._at:
                raise KeyboardInterrupt
            yield batch


def digits() -> tuple[nn.Module, list[Any], list[Any]]:
    split, _ = load_digits()
    model = trained(split.images[:200], split.labels[:200])
    forget, retain = split.only(3), split.without(3)
    return model, list(forget.loader(16))[:4], list(retain.loader(16))[:6]


def state(model: nn.Module) -> tuple[Any, ...]:
    """Hooks of every kind, flags and tensors."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [len(getattr(module, kind)) for module in model.modules() for kind in kinds]
    flags = [module.training for module in model.modules()]
    return hooks, flags, {name: tensor.clone() for name, tensor in model.state_dict().items()}


CALLS: dict[str, Callable[[nn.Module, Any, Any], object]] = {
    "collect": lambda model, forget, retain: unmerge.collect(model, retain),
    "fit": lambda model, forget, retain: unmerge.fit(model, forget, retain, init="zero"),
    "outputs": lambda model, forget, retain: outputs(model, {"retain": retain}),
}


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_between_batches_leaves_the_model_as_it_was(call: str, at: int) -> None:
    model, forget, retain = digits()
    model.train()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](model, forget, Interrupted(retain, at))
    after = state(model)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layer", [0, 2, 5])
def test_ctrl_c_inside_a_layer_leaves_the_model_as_it_was(
    call: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forget, retain = digits()
    before, calls = state(model), []
    module = model[layer]  # type: ignore[index]
    forward = module.forward

    def stopped(inputs: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(inputs)

    monkeypatch.setattr(module, "forward", stopped)
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](model, forget, retain)
    after = state(model)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)


def test_no_thread_is_left(tmp_path: Path) -> None:
    from PIL import Image

    for label in range(2):
        (tmp_path / str(label)).mkdir()
        for number in range(6):
            Image.new("L", (8, 8), 20 * number + label).save(tmp_path / str(label) / f"{number}.png")
    model = digits()[0]
    source = Folder(tmp_path, preprocessing_of(model, None, None, (), ()), {}, workers=3)
    before = threading.active_count()
    unmerge.collect(model, Part(source, range(12), 4))
    with pytest.raises(KeyboardInterrupt):
        unmerge.collect(model, Interrupted(list(Part(source, range(12), 4)), 1))
    assert threading.active_count() == before


@pytest.mark.parametrize("basis", ["auto", "cav-kmeans", "pca", "cav-class"])
def test_the_same_seed_gives_the_same_edit_bit_for_bit(basis: str) -> None:
    recipe = unmerge.Recipe(basis=basis, seed=3, rank=4)
    model, forget, retain = digits()
    torch.manual_seed(1)
    first = unmerge.fit(model, forget, retain, init="zero", recipe=recipe)
    torch.manual_seed(2)  # which is not the edit's seed
    torch.randn(7)
    second = unmerge.fit(model, forget, retain, init="zero", recipe=recipe)
    assert list(first.layers) == list(second.layers)
    for name, layer in first.layers.items():
        assert torch.equal(layer.B, second.layers[name].B)
        assert torch.equal(layer.Q, second.layers[name].Q)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("basis", ["auto", "pca", "cav-class"])
def test_on_cuda_the_same_seed_agrees_to_rounding(basis: str) -> None:
    """Prints the differences that docs/reliability.md gives; `pytest -rP` shows them."""
    recipe = unmerge.Recipe(basis=basis, seed=3, rank=4)
    model, forget, retain = digits()
    changes = []
    for device in ("cpu", "cuda", "cuda"):
        edit = unmerge.fit(model.to(device), forget, retain, init="zero", recipe=recipe)
        changes.append({name: (layer.B @ layer.Q.mT).cpu() for name, layer in edit.layers.items()})
    on_cpu, first, second = changes
    for what, found, expected in (("two runs", second, first), ("GPU and CPU", first, on_cpu)):
        assert found.keys() == expected.keys()
        apart = max(float((found[name] - change).norm() / change.norm()) for name, change in expected.items())
        print(f"{basis}: {what} differ by {apart:.1e} of the Frobenius norm of a layer's change")
        assert apart <= 1e-4
