"""Edit: a low-rank change of some layers that is applied, reverted, saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward
from unmerge.distributed.processes import is_first, together
from unmerge.editing.applying import apply_edit
from unmerge.editing.edit_file import LAYER_FACTS, check_edit, check_whole, recipe_of
from unmerge.editing.layer_edit import LayerEdit
from unmerge.editing.rewriting import rewritten, surviving_share
from unmerge.errors import EditError, FileError, RecipeError
from unmerge.model.layers import tensor_name, weight_in
from unmerge.model.ledger import withdraw
from unmerge.placement.sharded import Whole, split_like
from unmerge.placement.state import state_of
from unmerge.recipe import Recipe
from unmerge.storage.files import put_json, put_tensors, read_tensors, replacing
from unmerge.tables import html_table

KIND = "edit"


@dataclass(frozen=True, eq=False)
class Edit:
    """A request's result: small, reversible, and bound to the weights it was fitted on."""

    layers: dict[str, LayerEdit]
    recipe: Recipe
    alpha: float | None  # the recommended strength, where there is one
    head: str | None = None
    removed: tuple[int, ...] = ()  # rows of the head that are taken out
    weights: dict[str, str] = field(default_factory=dict)  # checksums of the tensors it changes
    provenance: dict[str, Any] = field(default_factory=dict)

    @together
    def apply(
        self,
        model: nn.Module,
        alpha: float | None = None,
        head_alpha: float | None = None,
        recalibrate: Iterable[Any] | None = None,
        *,
        forget: Iterable[Any] | None = None,
        forward: Forward | None = None,
        force: bool = False,
    ) -> nn.Module:
        """Change the model in place, all layers or none, and return it.

        alpha: the strength; by default the recommendation. head_alpha: another one for the classifier. Rows that the
        edit removes go at any strength, 0 included.
        recalibrate: batches of retain data, as training saw them, from which the BatchNorms behind edited layers are
        re-estimated and the classifier is refitted (`Recipe.refit`); without such a BatchNorm nothing is done.
        forget: batches of what is forgotten, labelled where that is more than one class, which the refit then counts
        as well (`Recipe.answer_length`); where nothing is refitted it is not read.
        force: apply to other weights than those the edit was fitted on.
        """
        apply_edit(self, model, *self.strengths(alpha, head_alpha), recalibrate, forget, forward, force)
        return model

    def is_same(self, other: Edit) -> bool:
        """Whether both make the same change, such as one edit that was loaded twice."""
        return self is other or (
            (self.head, self.removed, self.layers.keys()) == (other.head, other.removed, other.layers.keys())
            and all(layer.is_same(other.layers[name]) for name, layer in self.layers.items())
        )

    def revert(self, model: nn.Module, *, force: bool = False) -> nn.Module:
        """Take the edit out again: the weights are bit-identical to before; other edits stay."""
        withdraw(model, self, force)
        return model

    @contextmanager
    def applied(self, model: nn.Module, alpha: float | None = None, **options: Any) -> Iterator[nn.Module]:
        """The model with the edit inside the block, and without it afterwards."""
        self.apply(model, alpha, **options)
        try:
            yield model
        finally:
            self.revert(model, force=True)

    @property
    def touched(self) -> list[str]:
        """The names of the tensors that the edit changes."""
        names = [tensor_name(name, "weight") for name in self.layers]
        names += [layer.shift_to for layer in self.layers.values() if layer.shift_to is not None]
        if self.removed and self.head is not None:
            names.append(tensor_name(self.head, "bias"))
        return list(dict.fromkeys(names))

    def changes(self, state: Mapping[str, Tensor], alpha: float, head_alpha: float | None = None) -> dict[str, Tensor]:
        """The tensors of a state dict that the edit changes, with their new values."""
        head_alpha = alpha if head_alpha is None else head_alpha
        values = Whole(state)
        return {
            name: split_like(rewritten(self, name, values, alpha, head_alpha), state[name]) for name in self.touched
        }

    def survived(self, model: nn.Module, alpha: float | None = None) -> dict[str, float]:
        """The share of each layer's change that rounding to the weight's type leaves: 1 for float32, less for bf16."""
        alpha = self._strength(alpha)
        state = Whole(state_of(model))
        return {name: surviving_share(layer, weight_in(state, name), alpha) for name, layer in self.layers.items()}

    def save(self, directory: str | Path) -> None:
        """Write `edit.safetensors`, which holds everything, and `edit.json`, its readable part.

        Of several processes the first writes.
        """
        if not is_first():
            return
        directory = Path(directory)
        tensors = {
            f"{name}:{part}": value for name, layer in self.layers.items() for part, value in layer.tensors.items()
        }
        header = self.to_dict()
        readable = directory / "edit.json"
        with replacing(readable) as header_part, replacing(directory / "edit.safetensors") as part:
            put_json(header_part, header)
            put_tensors(part, tensors, KIND, header)
            readable.unlink(missing_ok=True)  # at no moment that of another edit beside these tensors

    @classmethod
    def load(cls, directory: str | Path, device: torch.device | str = "cpu") -> Edit:
        """Read what `save` wrote; nothing in it is executed."""
        directory = Path(directory)
        if not (directory / "edit.safetensors").is_file():
            raise FileError(f"{directory} holds no edit: there is no edit.safetensors in it.")
        tensors, header = read_tensors(directory / "edit.safetensors", KIND, device)
        return cls.from_dict(header, tensors, directory)

    def to_peft(
        self, directory: str | Path, alpha: float | None = None, base: nn.Module | str | Path | None = None
    ) -> None:
        """Write the edit at one strength as a PEFT LoRA adapter; what no adapter can hold is refused.

        Of several processes the first writes.
        base: the model that the edit was fitted on, or where it lies: its name on the Hub, or a path.
        """
        from unmerge.interop.adapters import write_adapter

        write_adapter(self, Path(directory), self._strength(alpha), base)

    @classmethod
    def from_peft(cls, directory: str | Path, base: nn.Module | None = None) -> Edit:
        """Read what `to_peft` wrote, or any plain LoRA adapter as an edit of alpha 1.

        base: the model that the adapter belongs to. An adapter of others says nothing of its weights, so without
        base such an edit must be applied with force=True.
        """
        from unmerge.interop.adapters import read_adapter

        return read_adapter(Path(directory), base)

    @classmethod
    def from_dict(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Path) -> Edit:
        """The edit of `to_dict`'s values and the tensors that belong to it, as read from `source`."""
        try:
            check_edit(header)
            layers = {
                name: LayerEdit(
                    tensors[f"{name}:B"],
                    tensors[f"{name}:Q"],
                    tensors.get(f"{name}:shift"),
                    **{fact: entry[fact] for fact in LAYER_FACTS},
                )
                for name, entry in header["layers"].items()
            }
            values = {name: header[name] for name in ("alpha", "head", "weights", "provenance")}
            edit = cls(layers, recipe_of(header["recipe"]), removed=tuple(header["removed"]), **values)
            check_whole(edit)
            return edit
        except (KeyError, TypeError, RecipeError, EditError) as error:
            raise FileError(f"{source} was written by another version of unmerge: {error!r}.") from error

    def to_dict(self) -> dict[str, Any]:
        """All but the tensors, as plain values."""
        return {
            "recipe": self.recipe.to_dict(),
            "alpha": self.alpha,
            "head": self.head,
            "removed": list(self.removed),
            "layers": {
                name: {"rank": layer.rank, **{fact: getattr(layer, fact) for fact in LAYER_FACTS}}
                for name, layer in self.layers.items()
            },
            "weights": self.weights,
            "provenance": self.provenance,
        }

    def __repr__(self) -> str:
        size = sum(layer.B.numel() + layer.Q.numel() for layer in self.layers.values())
        return (
            f"Edit({self.recipe.basis}, {len(self.layers)} layers, {size:,} numbers, alpha={self.alpha}"
            + (f", removes classes {list(self.removed)}" if self.removed else "")
            + ")"
        )

    def _repr_html_(self) -> str:
        rows = [
            [name, str(layer.rank), " x ".join(map(str, layer.B.shape)), layer.shift_to or ""]
            for name, layer in self.layers.items()
        ]
        table = html_table(["layer", "rank", "B", "constant goes to"], rows)
        choices = "".join(
            f"<li>{escape(name)}: {escape(why)}</li>" for name, why in self.provenance.get("choices", {}).items()
        )
        return f"<p>{escape(repr(self))}</p><ul>{choices}</ul>{table}"

    def strengths(self, alpha: float | None, head_alpha: float | None) -> tuple[float, float]:
        """The strength of the layers and of the classifier, with the recommendation where none is given."""
        alpha = self._strength(alpha)
        if head_alpha is not None and self.head is None:
            raise EditError("head_alpha= is given, but this edit does not change the classifier.")
        return alpha, alpha if head_alpha is None else self._strength(head_alpha)

    def _strength(self, alpha: float | None) -> float:
        alpha = self.alpha if alpha is None else alpha
        if alpha is None:
            raise EditError(
                "this edit recommends no strength. Pass alpha=..., for example 1.0; unmerge.search_alpha finds the "
                "smallest that forgets."
            )
        if isinstance(alpha, bool) or not isinstance(alpha, Real) or not math.isfinite(alpha) or alpha < 0:
            raise EditError(f"alpha={alpha!r} is not a finite number from 0 upwards.")
        return float(alpha)
