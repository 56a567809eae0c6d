"""An edit belongs to the tensors it was fitted on; what differs is named."""

from __future__ import annotations

import pytest
import torch

from networks import mlp
from unmerge import Edit, LayerEdit, Recipe
from unmerge.editing.binding import check_model, check_shapes, other_weights
from unmerge.errors import EditError
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint, kind_of


def edit(weights: dict[str, str]) -> Edit:
    layer = LayerEdit(torch.ones(7, 1), torch.eye(8)[:, :1], torch.ones(7), "2.bias")
    return Edit({"2": layer}, Recipe(), 1.0, weights=weights)


def test_the_same_weights_pass_and_others_are_named():
    model, other = mlp(), mlp(seed=1)
    state = state_of(model)
    bound = edit(fingerprint({name: state[name] for name in ("2.weight", "2.bias")}))
    check_model(bound, model)
    with pytest.raises(EditError, match=r"other weights of 2\. .*force=True"):
        check_model(bound, other)
    check_model(bound, other, force=True)


def test_an_edit_that_is_bound_to_nothing_says_so():
    with pytest.raises(EditError, match=r"does not say which weights"):
        check_model(edit({}), mlp())
    assert "base=model" in str(other_weights(edit({}), ["2.weight"]))


def test_missing_tensors_and_other_shapes_are_named_also_with_force():
    with pytest.raises(EditError, match=r"no 2\.weight, 2\.bias"):
        check_shapes(edit({}), {})
    with pytest.raises(EditError, match=r"2\.weight have other shapes"):
        check_model(edit({}), mlp((6, 8, 5, 4)), force=True)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_checksum_tells_type_and_shape(shape: tuple[int, ...], dtype: torch.dtype):
    assert kind_of(fingerprint({"a": torch.zeros(shape, dtype=dtype)})["a"]) == (dtype, shape)
