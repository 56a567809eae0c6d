"""What the first statistics settle for every layer: the recipe in full, the layers, what fine-tuning added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from unmerge.errors import LayerError, listing
from unmerge.model import initial
from unmerge.model.initial import Init, TaskVectors
from unmerge.model.layers import tensor_name
from unmerge.model.origin import check_origin
from unmerge.model.selection import select
from unmerge.recipe import Recipe
from unmerge.requests.request import Request
from unmerge.solving.doses import Doses
from unmerge.solving.heads import Head


@dataclass(frozen=True)
class Settled:
    """What holds for all layers of a request, in however many parts they are read."""

    recipe: Recipe
    names: list[str]  # the layers that are to be edited
    unchanged: list[str]  # those in which fine-tuning left nothing to take back
    task_vectors: TaskVectors
    head: Head
    doses: Doses

    def of(self, request: Request) -> list[str]:
        """The layers of one part."""
        return [name for name in self.names if name in request.statistics.layers]


class Start:
    """What training started from; weights that are not this model's are refused when they are first looked at."""

    def __init__(self, model: nn.Module, init: Init, recipe: Recipe, check_init: bool) -> None:
        self.is_zero = isinstance(init, str) and init == "zero"
        self._model, self._init, self._check = model, init, check_init and not self.is_zero
        self._with_biases = recipe.bias == "shrink"
        self._known: tuple[Sequence[str], TaskVectors] | None = None

    def task_vectors(self, names: Sequence[str]) -> TaskVectors:
        """What training added to these layers."""
        if self._known is None or self._known[0] != names:
            found = initial.task_vectors(self._model, self._init, names, with_biases=self._with_biases)
            if self._check:
                check_origin(found.pairs())
            self._known = (names, found)
        return self._known[1]


def settle(model: nn.Module, request: Request, recipe: Recipe, planned: list[str], start: Start) -> Settled:
    """What follows from the first part of a request that has layers; planned: the layers, where a plan has them."""
    recipe = request.settled(recipe)
    names = planned or request.layers(model, recipe)
    task_vectors = start.task_vectors(names)
    unchanged = [] if start.is_zero else _unchanged(model, names, task_vectors, request, recipe)
    edited = [name for name in names if name not in unchanged]
    head = Head.of(model, request, edited, recipe)
    head.check(recipe)
    doses = Doses.of(model, edited, request.classes, recipe, head)
    return Settled(recipe, edited, unchanged, task_vectors, head, doses)


def _unchanged(
    model: nn.Module, names: list[str], task_vectors: TaskVectors, request: Request, recipe: Recipe
) -> list[str]:
    """The layers that fine-tuning left alone, in which there is nothing to take back."""
    moved = {name for name in task_vectors if task_vectors.has_moved(name)}
    unchanged = [name for name in names if not {tensor_name(name, part) for part in ("weight", "bias")} & moved]
    if request.classes and recipe.head in ("auto", "remove"):
        # Rows can be taken out of a classifier that was not trained.
        unchanged = [name for name in unchanged if name != request.head(model)]
    if unchanged and select(model, recipe.layers, recipe.skip_layers).named:
        raise LayerError(
            f"{listing(unchanged)} have the same weights in init as in the model: fine-tuning, or the adapter, left "
            "them alone. Leave them out of layers=..."
        )
    return unchanged
