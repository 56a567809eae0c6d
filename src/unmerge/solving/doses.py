"""How much of its edit each layer gets, and which rows of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmerge.model.layers import layer_of
from unmerge.recipe import Recipe
from unmerge.solving.directions import Directions
from unmerge.solving.heads import Head

_RISE = 12  # convolutions over which an edit grows to all of itself


@dataclass(frozen=True)
class Doses:
    """What a basis with doses makes of the coefficients of a request's layers; others leave them as they are."""

    strengths: Mapping[str, float]  # 1 for a layer without one
    cut: str | None  # the classifier that loses the rows of forgotten classes
    classes: tuple[int, ...]  # which are these rows

    @staticmethod
    def of(model: nn.Module, names: Sequence[str], classes: tuple[int, ...], recipe: Recipe, head: Head) -> Doses:
        """names: all layers that are edited; classes: the forgotten ones."""
        if not recipe.traits.dosed:
            return Doses({}, None, ())
        return Doses(rising(model, names, recipe.early_strength), head.name if head.removed else None, classes)

    def applied(self, name: str, found: Directions, coefficients: Tensor) -> Tensor:
        """B of a layer in its dose. The classifier's rows of other classes read what is left as before."""
        coefficients = self.strengths.get(name, 1.0) * coefficients
        if not (found.keeps_rows or name == self.cut):
            return coefficients
        rows = torch.tensor(self.classes, device=coefficients.device)
        return torch.zeros_like(coefficients).index_copy(0, rows, coefficients[rows])


def rising(model: nn.Module, names: Sequence[str], early: float) -> dict[str, float]:
    """The strengths of the convolutions: evenly more over the last ones, from `early` up to 1.

    Layers behind each other take out what is left of the same thing: many that are equally strong overdo it, while
    one or two must be strong. Linear layers, for which that was not seen (docs/findings.md), have none.
    """
    convolutions = [name for name in names if isinstance(layer_of(model, name), nn.Conv2d)]
    missing = (1 - early) / _RISE
    return {name: 1 - missing * min(behind, _RISE) for behind, name in enumerate(reversed(convolutions))}
