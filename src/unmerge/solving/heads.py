"""The classifier in a request for whole classes: whether their rows can go, or an edit of its own take their place."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from unmerge.errors import EditError
from unmerge.model.layers import layer_of, weight_matrix
from unmerge.recipe import Recipe
from unmerge.requests.request import Request


def obstacle(model: nn.Module, request: Request, edited: Container[str], asked: bool = False) -> str:
    """Why the forgotten classes are no outputs of the classifier that an edit can take out; empty where they are.

    asked: the user said that they are, so it need not show in what the model returns.
    """
    head = request.head(model)
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


def head_alone(model: nn.Module, request: Request, edited: Container[str], recipe: Recipe) -> str | None:
    """The classifier where its rows stay: it has `head_directions`, and the outputs of forgotten classes `fall`."""
    wanted = recipe.basis == "blend" and recipe.head == "edit" and recipe.mean in ("auto", "preserve")
    return request.head(model) if wanted and not obstacle(model, request, edited) else None


def check_removal(model: nn.Module, request: Request, edited: Container[str], recipe: Recipe) -> None:
    """Refuse head="remove" where no row can go."""
    if recipe.head == "remove" and (reason := obstacle(model, request, edited, asked=True)):
        raise EditError(f"head='remove' cannot be done: {reason}. Use head='edit'.")


def removal(model: nn.Module, request: Request, edited: Container[str], recipe: Recipe) -> tuple[tuple[int, ...], str]:
    """The rows of the classifier that are taken out, and why none where the recipe wants that or leaves it open."""
    if recipe.head in ("edit", "keep"):
        return (), ""
    reason = obstacle(model, request, edited, asked=recipe.head == "remove")
    return (() if reason else request.classes), reason
