"""Class means in whitened coordinates: the same bases and edits as in the whole input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bases import is_orthonormal, places, pools, projector, ridges, rows_of
from torch import Tensor

import reference
from unmerge.solving.bases import ridged_factor
from unmerge.solving.whitened import WhitenedMeans


def whitened(
    classes: list[Tensor], ridge: float, groups: list[int] | None = None, device: str = "cpu"
) -> WhitenedMeans:
    """Of the rows of some classes, or of parts of classes where their groups are the same."""
    groups = groups or list(range(len(classes)))
    every = torch.cat(classes)
    whole = [torch.cat([rows for rows, own in zip(classes, groups, strict=True) if own == group]) for group in groups]
    within = torch.cat([rows - own.mean(0) for rows, own in zip(classes, whole, strict=True)])
    return WhitenedMeans.of(
        torch.tensor([len(rows) for rows in classes], dtype=torch.float64, device=device),
        torch.tensor(groups, device=device),
        torch.stack([rows.mean(0) - every.mean(0) for rows in classes]).to(device),
        ridged_factor((within.T @ within).to(device), ridge),
        every.var(0, correction=0).sum().sqrt(),
    )


def sides_of(sides: tuple[list[Tensor], list[Tensor]]) -> tuple[list[int], list[int]]:
    """The places of the forgotten and of the retained classes."""
    lost, count = len(sides[0]), len(sides[0]) + len(sides[1])
    return list(range(lost)), list(range(lost, count))


def frame_of(means: WhitenedMeans) -> Tensor:
    return means.maps.tensor_split(2, dim=1)[0].cpu()


def responses_of(means: WhitenedMeans) -> Tensor:
    return means.maps.tensor_split(2, dim=1)[1].cpu()


def private_of(means: WhitenedMeans, lost: list[int], kept: list[int]) -> Tensor:
    return means.private(means.shifts(lost), lost, kept)


def lda_of(means: WhitenedMeans, lost: list[int]) -> Tensor:
    return means.lda(means.shifts(lost))


@settings(max_examples=40, deadline=None)
@given(sides=pools(), ridge=ridges, seed=st.integers(0, 999))
def test_private_mean_is_the_reference_and_leaves_retain_class_means_alone(
    sides: tuple[list[Tensor], list[Tensor]], ridge: float, seed: int
) -> None:
    forget, retain = torch.cat(sides[0]), torch.cat(sides[1])
    means = whitened([*sides[0], *sides[1]], ridge)
    found = private_of(means, *sides_of(sides))
    if len(sides[1]) - 1 >= forget.shape[1]:
        assert found.shape[1] == 0
        return
    task_vector = torch.randn(4, forget.shape[1], generator=torch.Generator().manual_seed(seed)).double()
    expected, _ = reference.private_mean_task(forget, places(sides[0]), retain, places(sides[1]), ridge, task_vector)
    edit = task_vector @ responses_of(means) @ found @ (frame_of(means) @ means.turn @ found).T
    assert torch.allclose(edit, expected, atol=1e-7 * (1 + expected.abs().max().item()))
    kept = torch.stack([rows.mean(0) - retain.mean(0) for rows in sides[1]])
    assert (edit @ kept.T).abs().max() < 1e-8 * (1 + edit.abs().max() * kept.abs().max())


@settings(max_examples=40, deadline=None)
@given(sides=pools(), ridge=ridges, parts=st.booleans())
def test_lda_is_that_of_the_scatter_within_classes_and_between_them(
    sides: tuple[list[Tensor], list[Tensor]], ridge: float, parts: bool
) -> None:
    classes = [*sides[0], *sides[1]]
    groups = list(range(len(classes)))
    if parts:  # the first retained samples are of the first forgotten class
        groups[len(sides[0])] = 0
    every, retain = torch.cat(classes), torch.cat(sides[1])
    whole = [torch.cat([rows for rows, own in zip(classes, groups, strict=True) if own == group]) for group in groups]
    within = torch.cat([rows - own.mean(0) for rows, own in zip(classes, whole, strict=True)])
    scatter = within.T @ within
    spread = every - every.mean(0)
    system = spread.T @ spread + reference.ridged(scatter, ridge) - scatter
    shifts = [rows.mean(0) - retain.mean(0) for rows in sides[0]]
    expected = reference.gram_schmidt([torch.linalg.solve(system, shift) for shift in shifts], every.shape[1])
    means = whitened(classes, ridge, groups)
    found = frame_of(means) @ lda_of(means, sides_of(sides)[0])
    assert is_orthonormal(found)
    assert torch.allclose(projector(found), projector(expected), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(sides=pools(), ridge=ridges)
def test_duals_give_the_private_span_without_a_look_at_the_retained_means(
    sides: tuple[list[Tensor], list[Tensor]], ridge: float
) -> None:
    classes = [*sides[0], *sides[1]]
    means = whitened(classes, ridge)
    if len(classes) - 1 > classes[0].shape[1]:
        assert means.duals is None
        return
    assert means.duals is not None
    shares = means.rows / means.rows.sum()
    expected = torch.eye(len(classes), dtype=torch.float64) - shares.unsqueeze(1)
    assert torch.allclose(means.duals @ means.coordinates, expected, atol=1e-6)
    found, general = (private_of(which, *sides_of(sides)) for which in (means, dataclasses.replace(means, duals=None)))
    assert torch.allclose(projector(found), projector(general), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(sides=pools(), ridge=ridges)
def test_coordinates_are_the_whitened_means(sides: tuple[list[Tensor], list[Tensor]], ridge: float) -> None:
    classes = [*sides[0], *sides[1]]
    means = whitened(classes, ridge)
    mean = torch.cat(classes).mean(0)
    expected = torch.stack([rows.mean(0) - mean for rows in classes], dim=1)
    assert is_orthonormal(frame_of(means))
    assert torch.allclose(responses_of(means) @ means.coordinates, expected, atol=1e-8 * expected.abs().max().item())
    lengths = (means.coordinates * (means.lengths @ means.coordinates)).sum(0).sqrt()
    assert torch.allclose(lengths, expected.norm(dim=0), atol=1e-8 * expected.abs().max().item())


def test_a_single_retained_class_spans_nothing_whatever_its_rounding() -> None:
    lost = [rows_of(9, 6, seed, 2.0) for seed in range(2)]
    means = whitened([*lost, rows_of(20, 6, 7)], 1e-2)
    assert private_of(means, [0, 1], [2]).shape[1] == 2


def test_a_forgotten_class_with_the_mean_of_the_retained_ones_has_no_direction() -> None:
    kept = [rows_of(10, 5, seed, 1.0) for seed in range(2)]
    same = torch.cat(kept)  # its mean is theirs
    means = whitened([same, rows_of(10, 5, 9, 3.0), *kept], 1e-2)
    assert means.shifts([0, 1]).shape[1] == 1
    assert lda_of(means, [0, 1]).shape[1] == 1
    assert private_of(means, [0, 1], [2, 3]).shape[1] == 1
    alone = whitened([same, *kept], 1e-2)
    assert lda_of(alone, [0]).shape[1] == 0
    assert private_of(alone, [0], [1, 2]).shape[1] == 0


@pytest.mark.parametrize("width", [8, 9, 10, 12])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_inputs_that_depend_on_each_other_have_no_private_direction_of_rounding(width: int, noise: float) -> None:
    classes = [rows_of(30, width, seed, 2.0) for seed in range(10)]
    for rows in classes:
        rows[:, -1] = rows[:, 0] + noise * rows[:, 1]
    means = whitened(classes, 1e-2)
    found = private_of(means, [0], list(range(1, 10)))
    assert found.shape[1] == max(0, min(1, width - 1 - 8))
    if found.shape[1]:  # it tells the forgotten mean from the others, which are alike
        seen = found.T @ means.coordinates
        assert (seen[:, 1:] - seen[:, 1:].mean()).abs().max() < 1e-6 * (seen[:, 0] - seen[:, 1:].mean()).abs()


@pytest.mark.parametrize("count", [3, 6, 30])
def test_classes_with_the_same_mean_count_once(count: int) -> None:
    rows = rows_of(12, 8, 0, 2.0)
    others = [rows_of(10, 8, 1 + seed, 1.0) for seed in range(count)]
    once, twice = whitened([rows, *others], 1e-2), whitened([rows, rows, *others], 1e-2, [0, 0, *range(1, count + 1)])
    first = projector(frame_of(once) @ lda_of(once, [0]))
    again = projector(frame_of(twice) @ lda_of(twice, [0, 1]))
    assert torch.linalg.matrix_rank(again) == 1
    cosine = (first * again).sum()
    assert cosine > 0.8  # twice the rows weigh more in the scatter, which turns the direction a little


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_finds_the_same_bases() -> None:
    classes = [rows_of(30, 40, seed, 2.0) for seed in range(12)]
    here, there = (whitened(classes, 1e-2, device=device) for device in ("cpu", "cuda"))
    for lost in ([0], [3, 5]):
        kept = [place for place in range(12) if place not in lost]
        found = [
            [frame_of(means) @ part for part in (lda_of(means, lost), means.turn @ private_of(means, lost, kept))]
            for means in (here, there)
        ]
        for first, second in zip(*found, strict=True):
            assert torch.allclose(projector(first), projector(second), atol=1e-7 * (1 + projector(first).abs().max()))
