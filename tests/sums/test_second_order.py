"""Sums over rows written out: combined, about another pivot, in another type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from unmerge.errors import StatisticsError
from unmerge.linalg.signs import signs
from unmerge.sums.second_order import Sums, add_outer, add_step_, combined, fill_lower_, matrix_of, narrowed, squares

SIZE = 4


def rows_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2


def sums_of(rows: Tensor, kind: str) -> Sums:
    """Of rows about zero."""
    gram = rows.mT @ rows
    if kind == "gram":
        return {"gram": gram}
    return {"sketch": gram @ signs(len(gram), SIZE, gram), "diagonal": gram.diagonal().clone()}


KINDS = pytest.mark.parametrize("kind", ["gram", "sketch"])


@KINDS
def test_sums_combine_to_those_of_all_rows_and_back(kind):
    first, second = rows_of(0, 9, 6), rows_of(1, 5, 6)
    both = combined(sums_of(first, kind), sums_of(second, kind), +1)
    assert_close(both, sums_of(torch.cat([first, second]), kind))
    assert_close(combined(both, sums_of(second, kind), -1), sums_of(first, kind))


def test_sums_of_other_kinds_or_sizes_do_not_combine():
    gram, sketch = (sums_of(rows_of(0, 9, 6), kind) for kind in ("gram", "sketch"))
    for other in (sketch, sums_of(rows_of(0, 9, 5), "gram")):
        with pytest.raises(StatisticsError, match="do not combine"):
            combined(gram, other, +1)


@KINDS
@pytest.mark.parametrize("sign", [+1, -1])
def test_a_step_gives_the_sums_about_another_pivot(kind, sign):
    rows, step, others = rows_of(0, 9, 6), rows_of(1, 6), sums_of(rows_of(2, 20, 6), kind)
    found = combined(others, sums_of(rows, kind), sign)
    add_step_(found, len(rows), rows.sum(0), step, sign)
    assert_close(found, combined(others, sums_of(rows + step, kind), sign))


def test_a_step_of_groups_is_one_of_each():
    rows, step = rows_of(0, 3, 9, 6), rows_of(1, 3, 6)
    found = {"gram": rows.mT @ rows}
    add_step_(found, 9, rows.sum(1), step, +1)
    moved = rows + step.unsqueeze(1)
    assert_close(found["gram"], moved.mT @ moved)


@KINDS
def test_squares_are_the_diagonal_and_stay_in_double_precision_in_a_sketch(kind):
    rows = rows_of(0, 9, 6)
    found = narrowed(sums_of(rows, kind), torch.float32)
    assert matrix_of(found).dtype == torch.float32
    assert squares(found).dtype == (torch.float32 if kind == "gram" else torch.float64)
    assert_close(squares(found).double(), rows.square().sum(0), rtol=1e-6, atol=0)


def test_the_lower_triangle_is_that_of_the_upper():
    upper, noise = rows_of(0, 2, 5, 5).triu(), rows_of(1, 2, 5, 5).tril(-1)
    found = upper + noise
    fill_lower_(found)
    assert found.equal(upper + upper.triu(1).mT)


def test_an_outer_product_is_formed_in_the_type_of_the_matrix():
    matrix, vector = rows_of(0, 4, 4).float(), rows_of(1, 4)
    found = add_outer(matrix, vector, -1)
    assert found.dtype == torch.float32
    assert_close(found.double(), matrix.double() - vector.outer(vector), rtol=1e-5, atol=1e-5)
