"""A request: the statistics of what is forgotten and of what is kept, or of everything and some classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from unmerge.collecting.statistics import Statistics
from unmerge.errors import LayerError, StatisticsError, listing
from unmerge.model.layers import candidates, head_of
from unmerge.model.selection import select
from unmerge.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """What one edit is made from; solving sees no sample."""

    forget: Statistics | None
    retain: Statistics | None
    whole: Statistics | None = None  # of everything, in place of the two above
    classes: tuple[int, ...] = ()  # the forgotten labels, when no retained sample has one of them
    probe_forget: Statistics | None = None  # the rows that CAV probes see when their number is limited
    probe_retain: Statistics | None = None

    @property
    def statistics(self) -> Statistics:
        """The statistics that say which layers there are and where their constants go."""
        found = self.whole or self.retain
        assert found is not None
        return found

    @property
    def joint(self) -> Statistics | None:
        """The statistics of everything, where they are at hand: given, or what the retain ones were taken out of."""
        if self.retain is not None and self.retain.parts is not None and self.retain.parts[1] is self.forget:
            return self.retain.parts[0]
        return self.whole

    def settled(self, recipe: Recipe) -> Recipe:
        """The recipe with its basis chosen by what is known of the forget set."""
        if recipe.basis != "auto":
            return recipe
        if self.classes and recipe.solver == "exact":
            return recipe.but(basis="blend")
        labelled = self.forget is None or bool(self.forget.classes)
        if labelled or recipe.solver != "exact":
            return recipe.but(basis="lda" if labelled else "contrastive")
        return recipe.but(basis="wiener")

    def layers(self, model: nn.Module, recipe: Recipe) -> list[str]:
        """The layers to edit: what the recipe selects of those that were collected."""
        collected, left_out = self.statistics.layers, self.statistics.left_out
        chosen = [name for name in candidates(model) if name not in collected and name not in left_out]
        if recipe.layers is None and recipe.skip_layers == "auto" and chosen:
            names = list(collected)  # a choice was made when collecting
        else:
            names = select(model, recipe.layers, recipe.skip_layers, self.statistics.head).names
            missing = [name for name in names if name not in collected and name not in left_out]
            if missing:
                raise StatisticsError(
                    f"the recipe selects {listing(missing)}, which were not collected. Collect them too, or name the "
                    "layers to edit with Recipe(layers=...)."
                )
            names = [name for name in names if name in collected]
        kept = self.head(model) if recipe.head == "keep" else None
        names = [name for name in names if name != kept]
        if not names:
            raise nothing_selected()
        return names

    def head(self, model: nn.Module) -> str:
        return self.statistics.head or head_of(model)

    def only(self, layer: str) -> Request:
        """The same request of one layer."""
        return self.with_each(lambda statistics: statistics.only(layer))

    def with_each(self, change: Callable[[Statistics], Statistics]) -> Request:
        """The same request with its statistics changed, all of them alike."""
        parts = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        changed: Any = {name: change(part) for name, part in parts.items() if isinstance(part, Statistics)}
        return replace(self, **changed)

    def keeps_mean(self, layer: str, recipe: Recipe) -> bool:
        """Whether the edit of a layer answers to x − m_R alone: a constant takes the rest, or there is none."""
        takes_constant = self.statistics.shift_to[layer] is not None
        return recipe.mean == "orthogonal" or (recipe.mean != "free" and takes_constant)

    def input_key(self, layer: str) -> tuple[int, ...]:
        """Equal for layers that share their input, whose bases are then the same."""
        return tuple(id(part[layer]) for part in (self.forget, self.retain, self.whole) if part is not None)


def nothing_selected() -> LayerError:
    return LayerError(
        "the recipe selects none of the layers that were collected, or the classifier alone, which head='keep' leaves. "
        "Name others with Recipe(layers=...), or pass Recipe(head='edit')."
    )
