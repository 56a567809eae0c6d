"""Sketches against products written out: for any split, added, subtracted, narrowed and written to a file."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from networks import mlp
from unmerge import Moments, Statistics, collect
from unmerge.errors import FileError, StatisticsError
from unmerge.linalg.signs import signs
from unmerge.storage.files import read_header, read_tensors, write_tensors
from unmerge.sums.sketching import SketchedMoments, sketched


def rows_of(n: int, d: int, seed: int = 0, mean: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return mean + torch.randn(n, d, generator=generator, dtype=torch.float64)


def streamed(parts: list[Tensor], size: int) -> SketchedMoments:
    moments = SketchedMoments(size)
    for part in parts:
        moments.update(part)
    return moments


def assert_sketch(found: Moments, rows: Tensor, size: int, **tolerance: float) -> None:
    """Count, mean, variances and the product of the scatter are those of the rows."""
    rows = rows.double()
    assert isinstance(found, SketchedMoments)
    assert (found.n, found.size) == (len(rows), size)
    centred = rows - rows.mean(0)
    assert_close(found.mean, rows.mean(0), **tolerance)
    assert_close(found.variance, centred.square().mean(0), **tolerance)
    columns = signs(rows.shape[1], size, rows)
    assert_close(found.scatter_product().double(), centred.mT @ (centred @ columns), **tolerance)


@given(cuts=st.lists(st.integers(0, 30), max_size=4), size=st.integers(1, 9), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_streaming_equals_the_product_for_any_split(cuts, size, seed):
    rows = rows_of(30, 12, seed)
    edges = [0, *sorted(cuts), 30]
    parts = [rows[low:high] for low, high in pairwise(edges)]
    assert_sketch(streamed(parts, size), rows, size)


def test_halves_add_up_to_the_whole_and_one_taken_away_leaves_the_other():
    first, second = rows_of(20, 10), rows_of(35, 10, seed=1, mean=-40.0)
    one, other = (SketchedMoments(4).update(part) for part in (first, second))
    both = torch.cat([first, second])
    assert_sketch(one + other, both, 4)
    assert_sketch(other + one, both, 4)
    assert_sketch(SketchedMoments(4).update(both) - one, second, 4)
    assert_sketch(other.clone().move_pivot_(one.pivot), second, 4)
    with pytest.raises(StatisticsError, match="not among those counted"):
        SketchedMoments(4).update(both) - SketchedMoments(4).update(30 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_far_from_zero_keeps_the_directions(dtype):
    rows = (300 + torch.randn(500, 16, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = streamed(list(rows.split(90)), 6)
    assert found.sums["sketch"].dtype == torch.float32
    assert_sketch(found, rows, 6, rtol=1e-4, atol=0.05)


def test_a_gram_gives_any_sketch_and_a_sketch_any_smaller_one():
    rows = rows_of(40, 10)
    exact, sketch = Moments.of(rows), SketchedMoments(6).update(rows)
    assert_sketch(sketched(exact, 6), rows, 6)
    assert_sketch(sketched(sketch, 4), rows, 4)
    assert sketched(sketch, 6) is sketch
    assert sketched(exact, 10) is exact, "a sketch would not be smaller"


def test_what_needs_the_gram_is_refused_and_kinds_do_not_mix():
    rows = rows_of(40, 10)
    sketch = SketchedMoments(6).update(rows)
    with pytest.raises(StatisticsError, match=r"10 inputs was sketched .* \(size 6\).* Collect without memory="):
        sketch.scatter  # noqa: B018
    for other in (Moments.of(rows), SketchedMoments(5).update(rows)):
        with pytest.raises(StatisticsError, match="do not combine"):
            sketch + other
    with pytest.raises(StatisticsError, match="grouped"):
        SketchedMoments(2).update(torch.zeros(3, 5, 4))
    assert repr(sketch) == "Moments(n=40, features=(10,), sketch=6)"


def labelled(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(rows_of(8, 6, seed + place), torch.arange(8) % 4) for place in range(count)]


def test_statistics_are_sketched_layer_by_layer_added_and_subtracted():
    model = mlp((6, 40, 40, 4))
    exact = collect(model, labelled(5, 0), per_class="full")
    some = exact.sketched({"2": 8})
    assert some.sketches == {"2": 8}
    assert some["0"] is exact["0"]
    assert some.sketched({"2": 9}) is some
    part = collect(model, labelled(2, 0), some)
    assert part.sketches == {"2": 8}, "a second pass reads what the first has"
    rest = some - part
    assert_close(
        rest["2"].moments.scatter_product(), (exact - part_of(model)).sketched({"2": 8})["2"].moments.scatter_product()
    )
    # Of two sizes the smaller is left, and a Gram becomes a sketch.
    assert (some + part.sketched({"2": 5})).sketches == {"2": 5}
    assert (exact + part).sketches == {"2": 8}
    assert {moments.size for moments in (some + some)["2"].class_moments.values()} == {8}


def part_of(model: nn.Module) -> Statistics:
    return collect(model, labelled(2, 0))


def test_a_file_holds_sketches(tmp_path):
    path = tmp_path / "some.safetensors"
    found = collect(mlp((6, 40, 4)), labelled(3, 0), per_class="full").sketched({"2": 8})
    found.save(path)
    again = Statistics.load(path)
    assert again.sketches == {"2": 8}
    assert path.stat().st_size < 40 * 40 * 8 * 5, "no Gram is in it"
    for mine, theirs in zip(parts(again), parts(found), strict=True):
        assert mine.n == theirs.n
        assert_close(mine.scatter_product(), theirs.scatter_product())
        assert_close(mine.variance, theirs.variance)
    assert read_header(path, "statistics")["layers"]["2"]["rows"] == 24


def parts(statistics: Statistics) -> list[Moments]:
    layer = statistics["2"]
    return [layer.moments, *layer.class_moments.values()]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({"2:sketch": tensors["2:sketch"][:-1].contiguous()}),
        lambda tensors: tensors.update({"2:diagonal": tensors["2:diagonal"][:3].contiguous()}),
        lambda tensors: tensors.pop("2:diagonal"),
        lambda tensors: tensors.update({"2:sketch": tensors["2:sketch"] * float("nan")}),
    ],
)
def test_a_file_whose_sketch_does_not_fit_is_refused(tmp_path, change):
    path = tmp_path / "some.safetensors"
    collect(mlp((6, 40, 4)), labelled(3, 0)).sketched({"2": 8}).save(path)
    tensors, header = read_tensors(path, "statistics")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    write_tensors(path, tensors, "statistics", header)
    with pytest.raises(FileError, match="another version"):
        Statistics.load(path)
