"""The strength of an edit and what it does: accuracies of a classifier, answer probabilities of a language model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import typer
from torch import Tensor, nn

from unmerge.cli.edits import norms_matter, norms_of
from unmerge.cli.parts import some_of
from unmerge.cli.samples import few_of
from unmerge.cli.work import Gathered, Job
from unmerge.data.batches import first_batch, labels_of
from unmerge.editing.edit import Edit
from unmerge.editing.searching import AlphaSearch, Point
from unmerge.editing.strength import Metric, search_alpha
from unmerge.errors import EditError, InitError
from unmerge.measures import accuracy, answer_probability
from unmerge.model import initial
from unmerge.model.initial import Init, initial_weights

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Measure:
    """What is looked at on forget and retain data."""

    name: str
    key: str  # in run.json
    of: Metric
    max_drop: float  # on retain data, where none is asked for
    max_alpha: float


ACCURACY = Measure("accuracy", "accuracy", accuracy, 0.02, 10.0)
# Every token counts here, so that it falls sooner; and a few of many blocks change an answer slowly.
ANSWERS = Measure("answer probability", "probability", answer_probability, 0.1, 128.0)


@dataclass(frozen=True)
class Measured:
    """An edit with its strength and what it does."""

    edit: Edit
    measure: Measure = ACCURACY
    search: AlphaSearch | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)  # before and after, of each part
    samples: list[dict[str, Any]] = field(default_factory=list)
    norms: dict[str, Tensor] = field(default_factory=dict)  # BatchNorm statistics at the edit's strength


def check(job: Job) -> None:
    """Refuse texts for which no strength could be searched, before anything is read."""
    settings, module = job.settings, job.model.module
    is_open = settings.search or job.recipe.alpha is None
    if not job.request.is_text or not is_open or settings.target is not None:
        return
    if job.init == "zero":
        raise typer.BadParameter(
            "how far the answers are to be forgotten is not said. Pass --init with the model from before fine-tuning, "
            "whose answer probability is then the target; or --target 0.1, an answer probability; or --alpha A."
        )
    try:
        initial.check(module, job.init, dict(module.named_parameters()))  # all of them, for `before_fine_tuning`
    except InitError as error:
        raise InitError(
            f"{error} With --target 0.1, an answer probability, or --alpha A the edited layers do."
        ) from error


def measured(job: Job, edit: Edit, found: Gathered) -> Measured:
    """The edit at its strength: searched where it is open, with what is measured on a sample of the data."""
    measure = measure_of(first_batch(job.request.forget, "forget"))
    if measure is None:
        if edit.alpha is None:
            job.output.warn("the data have no labels, so no strength was searched; choose one with apply --alpha.")
        return Measured(edit)
    settings, module = job.settings, job.model.module
    forget, retain = (
        some_of(part, settings.samples, statistics.samples, job.recipe.seed)
        for part, statistics in ((job.request.forget, found.forget), (job.request.retain, found.retain))
    )
    matter = settings.recalibrate and norms_matter(edit, module, first_batch(retain, "retain"))
    behind: dict[str, Any] = {"recalibrate": retain, "forget": forget} if matter else {}
    search = None
    if settings.search or edit.alpha is None:
        with job.phase("strength", "searching the strength"):
            target = _target(job, measure, forget)
            search = search_alpha(
                *(edit, module, forget, target, retain),
                max_drop=measure.max_drop if settings.max_drop is None else settings.max_drop,
                metric=None if measure is ACCURACY else measure.of,
                max_alpha=measure.max_alpha,
                recalibrate=behind.get("recalibrate"),
            )
        edit = replace(edit, alpha=search.alpha, recipe=edit.recipe.but(alpha=search.alpha))
    with job.phase("curve", f"measuring forget and retain {measure.name} against alpha"):
        known = {} if search is None else {point.alpha: point for point in search.curve}
        curve = _curve(job, edit, measure, forget, retain, behind, known)
    with job.phase("samples", "predicting before and after"):
        parts = {"forget": forget, "retain": retain}
        before = {name: measure.of(module, part) for name, part in parts.items()}
        few = few_of(job.request, module)
        said = few.ask()
        with edit.applied(module, **(behind if edit.alpha else {})):
            after = {name: measure.of(module, part) for name, part in parts.items()}
            samples = few.entries(said, few.ask())
            kept = norms_of(module)
    goal = 0.01 if settings.target is None else settings.target
    if measure is ACCURACY and before["forget"] <= goal:
        job.output.warn(
            f"{before['forget']:.1%} of the forget samples were answered right before the edit: there is nothing to "
            "forget. Are these the trained weights (--weights FILE), and the labels those of the model?"
        )
    if search is None and measure is ACCURACY and not edit.removed and after["forget"] > goal:
        job.output.warn(
            f"{after['forget']:.1%} of the forget samples are still answered right at alpha {edit.alpha:g}; "
            "--search-alpha looks for one at which they are not."
        )
    return Measured(edit, measure, search, curve, {"before": before, "after": after}, samples, kept)


def measure_of(batch: Any) -> Measure | None:
    """Answer probabilities where tokens have labels, accuracies where samples have."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and labels.dim() == 2:
        return ANSWERS
    return None if labels_of(batch) is None else ACCURACY


def _target(job: Job, measure: Measure, forget: Iterable[Any]) -> float:
    """What was asked for; else for answers their probability before fine-tuning."""
    if job.settings.target is not None or measure is ACCURACY or job.init == "zero":
        return 0.01 if job.settings.target is None else job.settings.target
    with before_fine_tuning(job.model.module, job.init) as model:
        found = measure.of(model, forget)
    job.output.show(f"before fine-tuning the forget answers had probability {found:.4f}, which is the target.")
    return max(found, sys.float_info.min)


@contextmanager
def before_fine_tuning(model: nn.Module, init: Init) -> Iterator[nn.Module]:
    """The model with its initial weights inside the block, and its own tensors again after it."""
    parameters = dict(model.named_parameters())
    given = initial_weights(model, init, parameters)
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = given[name].to(parameter.dtype)
        yield model
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def _curve(
    job: Job,
    edit: Edit,
    measure: Measure,
    forget: Iterable[Any],
    retain: Iterable[Any],
    behind: Mapping[str, Any],
    known: Mapping[float, Point],
) -> list[dict[str, float]]:
    """What some strengths do, those of the search as it found them; removed rows stay in: without them all forget.

    behind: the data by which what lies behind the edit follows it.
    """
    trial, module = replace(edit, removed=()), job.model.module
    curve = []
    for alpha in _strengths(edit.alpha):
        if (point := known.get(alpha)) is not None and point.retain is not None:
            curve.append({"alpha": alpha, "forget": point.forget, "retain": point.retain})
            continue
        try:
            with trial.applied(module, alpha, **(behind if alpha else {}), force=True):
                values = {"forget": measure.of(module, forget), "retain": measure.of(module, retain)}
        except EditError:  # infinite in the type of the weights, as is every larger one
            break
        curve.append({"alpha": alpha, **values})
    return curve


def _strengths(chosen: float | None) -> list[float]:
    """The usual ones and the chosen one, which the usual ones are spread around where it is larger than all."""
    if chosen is None:
        return list(ALPHAS)
    scale = 1.0 if chosen <= ALPHAS[-1] else chosen / 2
    return sorted({*(round(scale * alpha, 4) for alpha in ALPHAS), chosen})
