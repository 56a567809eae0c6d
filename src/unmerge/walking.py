"""Walks over the modules of a model, of which every request makes several."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_modules(model: nn.Module, repeated: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` in its order, without a generator a level; repeated: a shared one at each place."""
    seen: set[nn.Module] = set()
    ahead: list[tuple[str, nn.Module]] = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if module in seen and not repeated:
            continue
        seen.add(module)
        yield name, module
        prefix = f"{name}." if name else ""
        ahead += [(prefix + key, child) for key, child in reversed(module._modules.items()) if child is not None]
