"""Other values in a model's tensors, all or none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unmerge.errors import EditError, listing
from unmerge.placement.state import state_of


def write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into the model's tensors, all or none."""
    state = state_of(model)
    check_changeable(state, values)
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(value)
    torch.clear_autocast_cache()  # which would go on with half-precision copies of the weights from before


def check_changeable(state: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Refuse tensors that were made in inference mode, which torch lets nobody change outside of it."""
    made = [name for name in names if state[name].is_inference()]
    if made and not torch.is_inference_mode_enabled():
        raise EditError(
            f"{listing(made)} were made under torch.inference_mode(), so torch refuses to change them. Make or load "
            "the model outside of it; torch.no_grad() does not have this effect."
        )


@contextmanager
def holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values of some tensors, inside the block."""
    state = state_of(model)
    present = {name: state[name].detach().clone() for name in values}
    write(model, values)
    try:
        yield
    finally:
        write(model, present)
