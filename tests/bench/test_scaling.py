"""The cases of the scaling bench, and its table."""

from __future__ import annotations

import torch

from unmerge.bench.scaling import Case, Cost, _request, cases, table


def test_each_number_grows_by_itself():
    smallest = Case(8, 4, 2, 1)
    found = list(cases(smallest, [1, 3]))
    assert found[0] == smallest
    for case in found[1:]:
        changed = [name for name in ("samples", "width", "layers", "ranks") if vars(case)[name] != vars(smallest)[name]]
        assert len(changed) == 1 or changed == ["samples", "ranks"]
    assert {case.ranks for case in found} == {1, 3}


def test_a_case_is_measured():
    cost = _request(Case(200, 12, 3, 1), torch.device("cpu"))
    assert cost.read > 0
    assert cost.solve > 0


def test_the_table_compares_with_one_process():
    shown = table({Case(8, 4, 2, 1): Cost(3.0, 0.5, 2_000_000), Case(8, 4, 2, 2): Cost(1.5, 0.5, 4_000_000)})
    assert shown.splitlines()[-1].endswith("2.00x")
    assert "4.00 MB" in shown
