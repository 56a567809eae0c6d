"""Language models judged by the probability of the right answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from unmerge.evaluation.pipeline import FLOOR, REFERENCE
from unmerge.evaluation.result import Column, Evaluation, Figure, Table
from unmerge.measures import answer_probability
from unmerge.version import VERSION

TITLE = "answers"


def judged(
    models: Mapping[str, nn.Module],
    reference: nn.Module | None,
    floor: nn.Module | None,
    splits: Mapping[str, Iterable[Any]],
) -> Evaluation:
    """The mean answer probability of every model on every split, beside the retrained ones."""
    anchors = {name: model for name, model in ((REFERENCE, reference), (FLOOR, floor)) if model is not None}
    rows = {**anchors, **models}
    cells = {
        name: {split: Figure(answer_probability(model, data)) for split, data in splits.items()}
        for name, model in rows.items()
    }
    columns = [_column(split, reference is not None) for split in splits]
    table = Table(TITLE, columns, cells, list(anchors), REFERENCE if reference is not None else None)
    return Evaluation({TITLE: table}, {}, {"models": list(rows), "unmerge": VERSION})


def _column(split: str, has_reference: bool) -> Column:
    """Near the retrained model's is best; without one, forgotten answers are judged by nothing."""
    if has_reference:
        return Column(split, "near", digits=2, percent=True)
    return Column(split, None if split == "forget" else "higher", digits=2, percent=True)
