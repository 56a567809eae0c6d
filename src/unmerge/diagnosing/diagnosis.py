"""diagnose(): whether a request can work, before anything is edited, from statistics alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unmerge.collecting.collection import collect
from unmerge.collecting.statistics import Statistics
from unmerge.data.batches import Forward, Mask, check_rereadable
from unmerge.diagnosing.layer_diagnosis import LayerDiagnosis, diagnose_layer
from unmerge.diagnosing.separability import Control, check_control, control_separability, random_control
from unmerge.diagnosing.verdict import Verdict, verdict_of
from unmerge.distributed.processes import is_first, together
from unmerge.distributed.warning import warn
from unmerge.errors import InitError, LayerError, StatisticsError, listing, reasons
from unmerge.linalg.products import full_precision
from unmerge.model.initial import Init, TaskVectors, lacking, task_vectors
from unmerge.model.ledger import as_collected
from unmerge.model.origin import check_origin
from unmerge.model.selection import select
from unmerge.placement.state import state_of
from unmerge.recipe import Recipe, given_or_default
from unmerge.requests.gathering import needed_of, pair_of
from unmerge.requests.parts import expected_layers
from unmerge.solving.doses import Doses
from unmerge.solving.heads import Head
from unmerge.storage.files import write_json
from unmerge.storage.fingerprint import fingerprint
from unmerge.tables import html_table, text_table


@dataclass(frozen=True)
class Diagnosis:
    """The layers, the request's separability beside a random subset's, and the verdict in plain words."""

    layers: dict[str, LayerDiagnosis]
    verdict: Verdict
    alpha: float
    basis: str
    samples: dict[str, int]

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{text_table(self._columns(), self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p><b>{self.verdict.kind}</b>. {self.verdict.sentence}</p>" + html_table(self._columns(), self._rows())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON text, also written to a file where a path is given, by the first of several processes."""
        if path is not None and is_first():
            write_json(Path(path), self.to_dict())
        return json.dumps(self.to_dict(), indent=2)

    def _columns(self) -> list[str]:
        return ["layer", "edited", "|τ|", "S", "fvar", "overlap", f"{self.basis}: overlap", "fvar", "gain", "shift"]

    def _rows(self) -> list[list[str]]:
        return [
            [
                name or "(model)",
                "yes" if layer.edited else "",
                f"{layer.task_vector_norm:.2f}",
                f"{layer.separability.score:.3f}",
                f"{layer.separability.captured:.2f}",
                f"{layer.separability.overlap:.2f}",
                f"{layer.overlap:.2f} ± {layer.overlap_spread:.2f}",
                f"{layer.captured:.2f}",
                f"{min(layer.gains):.2f}-{max(layer.gains):.2f}" if layer.gains else "",
                f"{layer.mean_shift:.3f}",
            ]
            for name, layer in self.layers.items()
        ]


@together
def diagnose(
    forget: Iterable[Any] | Statistics,
    retain: Iterable[Any] | Statistics,
    model: nn.Module,
    init: Init = "zero",
    *,
    recipe: Recipe | None = None,
    control: Statistics | Control | None = None,
    alpha: float | None = None,
    mask: Mask = None,
    forward: Forward | None = None,
) -> Diagnosis:
    """What the geometry of a request says of its chances; the model is not changed.

    forget, retain: batches, of which every editable layer is read, or their `Statistics`, with no further pass.
    control: the statistics of a random subset of the same size; drawn from retain where that is data.
    alpha: the strength for which the bounds are given; by default the recipe's, or 1.
    """
    given = next((part.weights for part in (retain, forget) if isinstance(part, Statistics)), None)
    with as_collected(model, given):
        return _diagnose(forget, retain, model, init, given_or_default(recipe), control, alpha, mask, forward)


def _diagnose(
    forget: Iterable[Any] | Statistics,
    retain: Iterable[Any] | Statistics,
    model: nn.Module,
    init: Init,
    recipe: Recipe,
    control: Statistics | Control | None,
    alpha: float | None,
    mask: Mask,
    forward: Forward | None,
) -> Diagnosis:
    options: dict[str, Any] = {"mask": mask, "forward": forward, "seed": recipe.seed}
    retain_data = None if isinstance(retain, Statistics) else retain
    if not isinstance(forget, Statistics) and not isinstance(retain, Statistics):
        selected = select(model, recipe.layers).names
        # A wrong init is told before the passes.
        task_vectors(model, init, covered(model, init, selected, expected_layers(model, recipe, init)))
    if not isinstance(forget, Statistics):
        layers = retain if isinstance(retain, Statistics) else recipe.layers
        forget = collect(model, forget, layers, **needed_of(recipe), **options, what="forget")
    if not isinstance(retain, Statistics):
        if control is None:
            check_rereadable(retain, "retain", "the random control")
        retain = collect(model, retain, forget, **options, what="retain")
    request = pair_of(model, forget, retain, recipe)
    assert request.forget is not None
    assert request.retain is not None
    forget, retain = request.forget, request.retain
    if not forget.layers:
        raise LayerError(f"no layer is left to look at: {reasons(forget.left_out)}. Pass more data, or a lower rank.")
    if request.statistics.sketches:
        raise StatisticsError(
            f"{listing(request.statistics.sketches)} were sketched to fit the memory, and a diagnosis needs their "
            "whole spectrum. Collect them without memory=, leave them out with layers=..., or see the verdict that fit "
            "gives."
        )
    recipe = request.settled(recipe)
    forget.check_weights(fingerprint(state_of(model)))
    if isinstance(control, Statistics):
        control = Control(control, {})
    if control is not None:
        check_control(request, control.statistics)
    elif retain_data is not None and retain.samples > 1:
        control = random_control(model, retain_data, request, options)
    edited = request.layers(model, recipe)
    names = covered(model, init, list(forget.layers), edited)
    if len(names) < len(forget.layers):
        left_out = [name for name in forget.layers if name not in names]
        warn(f"init does not have {listing(left_out)}: not edited, and left out of the diagnosis.")
    vectors = task_vectors(model, init, names)
    if init != "zero":
        _warn_of_a_stranger(vectors)
    strength = next(value for value in (alpha, recipe.alpha, 1.0) if value is not None)
    head = Head.of(model, request, names, recipe)  # also of a classifier that is only looked at
    doses = Doses.of(model, edited, request.classes, recipe, Head.of(model, request, edited, recipe))
    with full_precision(), torch.no_grad():
        found = {
            name: diagnose_layer(request, name, model, vectors.of(name), recipe, strength, name in edited, head, doses)
            for name in names
        }
        random = {
            name: control_separability(request, control.statistics, name)
            for name in edited
            if control is not None and name in control.statistics.layers
        }
    verdict = verdict_of(
        {name: found[name].separability for name in edited},
        random,
        {name: found[name].mean_shift for name in edited},
        forget.samples,
        None if control is None else control.shifts,
    )
    samples = {"forget": forget.samples, "retain": retain.samples}
    return Diagnosis(found, verdict, strength, recipe.basis, samples)


def covered(model: nn.Module, init: Init, layers: Sequence[str], edited: Sequence[str]) -> list[str]:
    """The layers that can be looked at: all but those that are not edited and that init does not have."""
    absent = lacking(model, init, [name for name in layers if name not in edited])
    return [name for name in layers if name not in absent]


def _warn_of_a_stranger(vectors: TaskVectors) -> None:
    """What `fit` refuses is looked at all the same; the cosine of each layer is in the diagnosis."""
    try:
        check_origin(vectors.pairs())
    except InitError as error:
        warn(str(error))
