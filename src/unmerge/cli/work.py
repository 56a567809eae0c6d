"""The stages of a run: statistics, diagnosis, edit, strength, and what is measured of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unmerge.batches import feed, first_batch, labels_of, logits_of, on_device
from unmerge.cli.console import Output, Refused
from unmerge.cli.edits import norms_matter, norms_of
from unmerge.cli.images import png
from unmerge.cli.models import Loaded
from unmerge.cli.parts import pictures_of, some_of
from unmerge.cli.requests import Requested
from unmerge.cli.resuming import Kept
from unmerge.collection import collect
from unmerge.diagnosis import Diagnosis, diagnose
from unmerge.edit import Edit
from unmerge.errors import EditError
from unmerge.initial import Init
from unmerge.layers import select
from unmerge.measures import accuracy
from unmerge.normalization import evaluating
from unmerge.pipeline import fit
from unmerge.recipe import Recipe
from unmerge.request import needed_of, pair_of
from unmerge.separability import random_control
from unmerge.statistics import Statistics
from unmerge.strength import AlphaSearch, search_alpha

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
SAMPLES = 12  # that a report shows


@dataclass(frozen=True)
class Settings:
    """What a run does beyond its recipe."""

    on_verdict: str = "warn"
    search: bool = False  # also where the edit recommends a strength
    target: float = 0.01
    max_drop: float = 0.02
    recalibrate: bool = True  # the BatchNorms behind the edit, where there are any
    check_init: bool = True
    edited_only: bool = False
    samples: int = 1000  # of each part that accuracies are measured on


@dataclass
class Job:
    """A model, a request and how it is to be done; the seconds of each phase."""

    model: Loaded
    init: Init
    request: Requested
    recipe: Recipe
    settings: Settings
    output: Output
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, said: str) -> Iterator[None]:
        self.output.note(said)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)


@dataclass(frozen=True)
class Gathered:
    """The statistics of a request: of everything, of what is forgotten and of what is kept."""

    everything: Statistics
    forget: Statistics
    retain: Statistics


@dataclass(frozen=True)
class Measured:
    """An edit with its strength and what it does."""

    edit: Edit
    search: AlphaSearch | None
    curve: list[dict[str, float]]
    accuracy: dict[str, dict[str, float]]  # before and after, of each part
    samples: list[dict[str, Any]]
    norms: dict[str, Tensor] = field(default_factory=dict)  # BatchNorm statistics at the edit's strength


def layer_choice(job: Job) -> dict[str, Any]:
    """Which layers are read: all, so that the report shows every depth, or only those that are edited."""
    chosen = {"layers": job.recipe.layers, "skip_layers": job.recipe.skip_layers}
    select(job.model.module, job.recipe.layers, job.recipe.skip_layers)  # a wrong name is told before the passes
    return chosen if job.settings.edited_only else {}


def gather(job: Job, known: Statistics | None = None, kept: Kept | None = None) -> Gathered:
    """One pass over the data, less what is kept of it; with the statistics of everything, over what is forgotten."""
    module, request, seed = job.model.module, job.request, job.recipe.seed
    choice, needed = layer_choice(job), needed_of(job.recipe)

    def read_forget() -> Statistics:
        layers: dict[str, Any] = choice if known is None else {"layers": known}
        return collect(module, request.forget, **layers, **needed, seed=seed, what="forget")

    def read_retain() -> Statistics:
        return collect(module, request.retain, forget, seed=seed, what="retain")

    with job.phase("statistics", "reading what is to be forgotten"):
        if known is not None or kept is None:
            forget = read_forget()
        else:
            forget = kept.passed("forget", request.forget, read_forget)
    if known is not None:
        return Gathered(known, forget, known - forget)
    with job.phase("statistics", "reading what is to be retained"):
        retain = read_retain() if kept is None else kept.passed("retain", request.retain, read_retain)
    both = (
        (forget, retain)
        if bool(forget.classes) == bool(retain.classes)
        else (
            forget.without_classes(),
            retain.without_classes(),
        )
    )
    return Gathered(both[0] + both[1], forget, retain)


def diagnosed(job: Job, found: Gathered) -> Diagnosis:
    """The diagnosis, with a random subset of the retained samples beside it."""
    with job.phase("diagnosis", "looking at the geometry of the request"):
        control = None
        if found.retain.samples > 1:
            options = {"mask": None, "forward": None, "seed": job.recipe.seed}
            pair = pair_of(found.forget, found.retain, job.recipe)
            control = random_control(job.model.module, job.request.retain, pair, options)
        return diagnose(found.forget, found.retain, job.model.module, job.init, recipe=job.recipe, control=control)


def heed(job: Job, found: Gathered, diagnosis: Diagnosis) -> None:
    """Stop, or warn, where samples that are no whole classes have nothing in common."""
    verdict = diagnosis.verdict
    classes = pair_of(found.forget, found.retain, job.recipe).classes
    if verdict.kind != "instance-like" or classes or job.settings.on_verdict == "ignore":
        return
    if job.settings.on_verdict == "raise":
        raise Refused(f"the request looks {verdict}\nPass --on-verdict warn to edit all the same.")
    job.output.warn("the request looks instance-like; --on-verdict raise refuses such requests.")


def fitted(job: Job, found: Gathered, diagnosis: Diagnosis) -> Edit:
    """The edit; from the data once more where the recipe limits the rows that probes see."""
    limited = job.recipe.max_points is not None and job.recipe.basis in ("cav-class", "cav-kmeans")
    parts = (job.request.forget, job.request.retain) if limited else (found.forget, found.retain)
    with job.phase("edit", "computing the edit"):
        edit = fit(
            job.model.module,
            *parts,
            init=job.init,
            recipe=job.recipe,
            on_verdict="ignore",
            check_init=job.settings.check_init,
        )
    return replace(edit, provenance={**edit.provenance, "verdict": asdict(diagnosis.verdict)})


def measured(job: Job, edit: Edit, found: Gathered) -> Measured:
    """The edit at its strength: searched where it is open, with the accuracies on a sample of the data."""
    if not found.forget.classes:
        if edit.alpha is None:
            job.output.warn("the data have no labels, so no strength was searched; choose one with apply --alpha.")
        return Measured(edit, None, [], {}, [])
    settings, module = job.settings, job.model.module
    forget, retain = (
        some_of(part, settings.samples, statistics.samples, job.recipe.seed)
        for part, statistics in ((job.request.forget, found.forget), (job.request.retain, found.retain))
    )
    matter = settings.recalibrate and norms_matter(edit, module, first_batch(retain, "retain"))
    norms = retain if matter else None
    search = None
    if settings.search or edit.alpha is None:
        with job.phase("strength", "searching the strength"):
            search = search_alpha(
                edit, module, forget, settings.target, retain, max_drop=settings.max_drop, recalibrate=norms
            )
        edit = replace(edit, alpha=search.alpha, recipe=edit.recipe.but(alpha=search.alpha))
    with job.phase("curve", "measuring forget and retain accuracy against alpha"):
        curve = _curve(job, edit, forget, retain, norms)
    with job.phase("samples", "predicting before and after"):
        before = {name: accuracy(module, part) for name, part in (("forget", forget), ("retain", retain))}
        few, pictures = pictures_of(job.request.forget, SAMPLES)
        shown = {"before": _predicted(job, few)}
        with edit.applied(module, recalibrate=norms):
            after = {name: accuracy(module, part) for name, part in (("forget", forget), ("retain", retain))}
            shown["after"] = _predicted(job, few)
            kept = norms_of(module)
    labels = labels_of(few)
    assert labels is not None
    samples = [
        {
            "png": png(picture),
            "label": _name(job, int(label)),
            **_shown(job, "before", shown["before"][place]),
            **_shown(job, "after", shown["after"][place]),
        }
        for place, (label, picture) in enumerate(zip(labels, pictures, strict=True))
        if picture is not None
    ]
    return Measured(edit, search, curve, {"before": before, "after": after}, samples, kept)


def _curve(
    job: Job, edit: Edit, forget: Iterable[Any], retain: Iterable[Any], norms: Iterable[Any] | None
) -> list[dict[str, float]]:
    """Accuracies at some strengths; removed rows stay in, since without them every strength forgets."""
    trial, module = replace(edit, removed=()), job.model.module
    strengths = sorted({*ALPHAS, *([] if edit.alpha is None else [edit.alpha])})
    curve = []
    for alpha in strengths:
        try:
            with trial.applied(module, alpha, recalibrate=norms if alpha else None, force=True):
                curve.append({"alpha": alpha, "forget": accuracy(module, forget), "retain": accuracy(module, retain)})
        except EditError:  # infinite in the type of the weights, as is every larger one
            break
    return curve


@torch.no_grad()
def _predicted(job: Job, batch: Any) -> list[tuple[int, float]]:
    module = job.model.module
    with evaluating(module):
        logits = logits_of(feed(module, on_device(module, batch)))
    assert logits is not None
    shares, places = logits.double().softmax(1).max(1)
    return list(zip(places.tolist(), shares.tolist(), strict=True))


def _shown(job: Job, when: str, found: tuple[int, float]) -> dict[str, Any]:
    return {when: _name(job, found[0]), f"{when}_confidence": round(found[1], 4)}


def _name(job: Job, label: int) -> str:
    return job.request.names.get(label, str(label))
