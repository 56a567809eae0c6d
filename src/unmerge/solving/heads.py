"""The classifier in a request for whole classes: whether their rows can go, or an edit of its own take their place."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import nn

from unmerge.errors import EditError
from unmerge.model.layers import layer_of, weight_matrix
from unmerge.recipe import Recipe
from unmerge.requests.request import Request


@dataclass(frozen=True)
class Head:
    """The classifier, and what becomes of the rows of forgotten classes."""

    name: str
    removed: tuple[int, ...] = ()  # the rows that are taken out
    why_kept: str = ""  # why none is, where the recipe wants that or leaves it open
    falls: bool = False  # whether it has `head_directions` instead, and forgotten outputs `fall`

    @staticmethod
    def of(model: nn.Module, request: Request, edited: Container[str], recipe: Recipe) -> Head:
        """What the recipe makes of it; edited: the layers that are."""
        name = request.head(model)
        if recipe.head == "keep":
            return Head(name)
        reason = _obstacle(model, name, request, edited, asked=recipe.head == "remove")
        if recipe.head == "edit":
            return Head(name, falls=not reason and recipe.traits.dosed and recipe.mean in ("auto", "preserve"))
        return Head(name, () if reason else request.classes, reason)

    def check(self, recipe: Recipe) -> None:
        """Refuse head="remove" where no row can go."""
        if recipe.head == "remove" and not self.removed:
            raise EditError(f"head='remove' cannot be done: {self.why_kept}. Use head='edit'.")


def _obstacle(model: nn.Module, head: str, request: Request, edited: Container[str], asked: bool) -> str:
    """Why the forgotten classes are no outputs of the classifier that an edit can take out; empty where they are.

    asked: the user said that they are, so it need not show in what the model returns.
    """
    if not request.classes:
        return "the request is not made of whole classes"
    if head not in edited:
        return f"the classifier {head!r} is not among the edited layers"
    module = layer_of(model, head)
    width = weight_matrix(module).shape[0]
    if request.statistics.head is None and not asked:
        return f"the model does not return one row of logits a sample from {head!r}"
    if getattr(module, "bias", None) is None:
        return f"the classifier {head!r} has no bias"
    if max(request.classes) >= width or min(request.classes) < 0:
        return f"the labels {list(request.classes)} are not all among the {width} rows of the classifier {head!r}"
    return ""
