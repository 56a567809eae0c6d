"""One tensor at a time, an edit writes what its formulas say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from unmerge import Edit, LayerEdit, Recipe
from unmerge.editing.rewriting import REMOVED_BIAS, rewritten, surviving_share


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def edit(transposed: bool = False, removed: tuple[int, ...] = ()) -> Edit:
    body = LayerEdit(drawn(4, 2, seed=0), drawn(6, 2, seed=1), drawn(4, seed=2), "norm.running_mean")
    head = LayerEdit(drawn(3, 2, seed=3), drawn(4, 2, seed=4), drawn(3, seed=5), "head.bias", transposed)
    return Edit({"body": body, "head": head}, Recipe(), 1.0, head="head", removed=removed)


def state(transposed: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "body.weight": drawn(4, 3, 2, seed=6, dtype=dtype),
        "norm.running_mean": drawn(4, seed=7),
        "head.weight": drawn(*((4, 3) if transposed else (3, 4)), seed=8, dtype=dtype),
        "head.bias": drawn(3, seed=9, dtype=dtype),
    }


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("removed", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_tensor_is_what_the_formulas_say(transposed: bool, removed: tuple[int, ...], dtype: torch.dtype):
    given, change = state(transposed, dtype), edit(transposed, removed)
    body, head = change.layers["body"], change.layers["head"]
    product = (head.B.double() @ head.Q.double().T).T if transposed else head.B.double() @ head.Q.double().T
    expected = {
        "body.weight": given["body.weight"].double() - 0.7 * (body.B.double() @ body.Q.double().T).reshape(4, 3, 2),
        "norm.running_mean": given["norm.running_mean"].double() - 0.7 * body.shift.double(),
        "head.weight": given["head.weight"].double() - 1.9 * product,
        "head.bias": given["head.bias"].double() + 1.9 * head.shift.double(),
    }
    for row in removed:
        (expected["head.weight"].T if transposed else expected["head.weight"])[row] = 0
        expected["head.bias"][row] = REMOVED_BIAS
    for name, value in expected.items():
        # All that is needed of the others is the head's bias.
        found = rewritten(change, name, {name: given[name], "head.bias": given["head.bias"]}, 0.7, 1.9)
        assert found.dtype == given[name].dtype
        assert_close(found, value.to(given[name].dtype))
    assert change.changes(given, 0.7, 1.9).keys() == expected.keys()


def test_rows_that_were_removed_before_stay_so():
    given = state()
    given["head.bias"][2], given["head.weight"][2] = REMOVED_BIAS, 0
    for name, gone in (("head.weight", 0), ("head.bias", REMOVED_BIAS)):
        found = rewritten(edit(), name, given, 1.0, 1.0)
        assert (found[2] == gone).all()
        assert not torch.equal(found[:2], given[name][:2])


def test_a_tensor_that_the_edit_leaves_alone_is_returned_as_it_is():
    other = drawn(2, seed=1)
    assert rewritten(edit(), "other", {"other": other}, 1.0, 1.0).data_ptr() == other.data_ptr()


def test_the_share_that_survives_is_the_projection_of_the_rounded_change():
    layer, weight = edit().layers["head"], drawn(3, 4, seed=8, dtype=torch.bfloat16)
    meant = -1e-3 * layer.B.double() @ layer.Q.double().T
    rounded = (weight.double() + meant).bfloat16().double() - weight.double()
    share = (rounded * meant).sum() / (meant * meant).sum()
    assert surviving_share(layer, weight, 1e-3) == pytest.approx(share.item(), rel=1e-5)
    assert surviving_share(layer, weight.double(), 1e-3) == pytest.approx(1)
    assert surviving_share(layer, weight, 0.0) == 1.0


@pytest.mark.parametrize(("kind", "shape"), [("plain", (6, 5)), ("convolution", (6, 5, 1)), ("transposed", (5, 6))])
def test_it_is_the_same_whether_rows_are_taken_together_or_apart(kind: str, shape: tuple[int, ...], monkeypatch):
    layer = LayerEdit(drawn(6, 2, seed=0), drawn(5, 2, seed=1), transposed=kind == "transposed")
    weight = drawn(*shape, seed=2, dtype=torch.bfloat16)
    together = surviving_share(layer, weight, 3e-3)
    monkeypatch.setattr("unmerge.editing.rewriting._ENTRIES", 11)
    assert surviving_share(layer, weight, 3e-3) == pytest.approx(together, rel=1e-5)
    grouped = LayerEdit(layer.B.reshape(2, 3, 2), torch.stack([layer.Q, -layer.Q]))
    halves = torch.cat([layer.B[:3] @ layer.Q.T, -layer.B[3:] @ layer.Q.T]).double() * -3e-3
    exact = drawn(6, 5, seed=2, dtype=torch.bfloat16).double()
    rounded = (exact + halves).bfloat16().double() - exact
    share = (rounded * halves).sum() / halves.square().sum()
    assert surviving_share(grouped, exact.bfloat16(), 3e-3) == pytest.approx(share.item(), rel=1e-5)
