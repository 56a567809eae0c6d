"""Which operations read a layer's output: where a BatchNorm alone does, its mean can take a constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unmerge.model.evaluating import batch_norms


class Consumers(TorchDispatchMode):
    """Records, while active, which operations read the outputs that are given to `watch`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._means = {
            id(module.running_mean): name
            for name, module in batch_norms(model).items()
            if module.running_mean is not None
        }
        self._watched: dict[int, tuple[str, Tensor]] = {}  # the tensor is kept, so that its id stays its own
        self._readers: dict[str, list[str | None]] = defaultdict(list)
        self._norm_calls: dict[str, int] = defaultdict(int)
        self._paused = False

    def watch(self, layer: str, output: Tensor) -> None:
        self._watched[id(output)] = (layer, output)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def sole_norm(self, layer: str) -> str | None:
        """The BatchNorm that alone reads this layer's output and reads nothing else, if there is one."""
        readers = self._readers[layer]
        if len(readers) != 1 or readers[0] is None or self._norm_calls[readers[0]] != 1:
            return None
        return readers[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused:
            given = [*args, *(kwargs or {}).values()]
            listed = [value for group in given if isinstance(group, (list, tuple)) for value in group]
            tensors = [value for value in (*given, *listed) if isinstance(value, Tensor)]
            norm = next((self._means[id(tensor)] for tensor in tensors if id(tensor) in self._means), None)
            if norm is not None:
                self._norm_calls[norm] += 1
            for tensor in tensors:
                if id(tensor) in self._watched:
                    self._readers[self._watched[id(tensor)][0]].append(norm)
        return func(*args, **(kwargs or {}))
