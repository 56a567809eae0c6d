"""Walks over modules are those of torch."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from decoders import decoder
from networks import cnn
from unmerge.walking import named_modules


def shared() -> nn.Module:
    """A module that stands at two places, inside and beside another, and one that is None."""
    one = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"first": one, "second": nn.Sequential(nn.Linear(2, 2), one), "third": one[0]})
    model.register_module("nothing", None)
    return model


@pytest.mark.parametrize("make", [shared, cnn, partial(decoder, "mixtral"), partial(nn.Linear, 2, 2)])
@pytest.mark.parametrize("repeated", [False, True])
def test_a_walk_is_that_of_named_modules(make, repeated: bool) -> None:
    model = make()
    assert list(named_modules(model, repeated)) == list(model.named_modules(remove_duplicate=not repeated))
