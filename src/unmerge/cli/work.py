"""The stages of a run up to its edit: statistics, diagnosis, edit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unmerge.cli.console import Output, Refused
from unmerge.cli.models import Loaded
from unmerge.cli.requests import Requested
from unmerge.cli.resuming import Kept
from unmerge.collecting.collection import collect
from unmerge.collecting.statistics import Statistics
from unmerge.diagnosing.diagnosis import Diagnosis, covered, diagnose
from unmerge.diagnosing.separability import random_control
from unmerge.editing.edit import Edit
from unmerge.model.initial import Init, task_vectors
from unmerge.model.origin import check_origin
from unmerge.model.selection import select
from unmerge.pipeline import fit
from unmerge.recipe import Recipe
from unmerge.requests.gathering import needed_of, pair_of
from unmerge.requests.parts import expected_layers
from unmerge.requests.request import Request


@dataclass(frozen=True)
class Settings:
    """What a run does beyond its recipe."""

    on_verdict: str = "warn"
    search: bool = False  # also where the edit recommends a strength
    target: float | None = None  # of the search, as is the next; None: what suits the measure
    max_drop: float | None = None
    recalibrate: bool = True  # the BatchNorms behind the edit, where there are any
    check_init: bool = True
    edited_only: bool = False
    samples: int = 1000  # of each part that is measured on


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
    """The statistics of everything, and the request: of what is forgotten and of what is kept."""

    everything: Statistics
    request: Request

    @property
    def forget(self) -> Statistics:
        assert self.request.forget is not None
        return self.request.forget

    @property
    def retain(self) -> Statistics:
        assert self.request.retain is not None
        return self.request.retain


def layer_choice(job: Job) -> dict[str, Any]:
    """Which layers are read: all, so that the report shows every depth, or only those that are edited.

    Of a language model only these: the statistics of all would take more memory than the model.
    """
    chosen = {"layers": job.recipe.layers, "skip_layers": job.recipe.skip_layers}
    select(job.model.module, job.recipe.layers, job.recipe.skip_layers)  # a wrong name is told before the passes
    return chosen if job.settings.edited_only or job.request.is_text else {}


def check_init(job: Job, known: Statistics | None = None) -> None:
    """Refuse, before the passes, initial weights that do not fit the layers that these read."""
    module = job.model.module
    read = select(module, **layer_choice(job)).names if known is None else list(known.layers)
    edited = expected_layers(module, job.recipe, job.init, known)
    vectors = task_vectors(module, job.init, covered(module, job.init, read, edited))
    if job.settings.check_init and job.init != "zero":
        check_origin(vectors.pairs(edited))


def gather(job: Job, known: Statistics | None = None, kept: Kept | None = None) -> Gathered:
    """One pass over the data, less what is kept of it; with the statistics of everything, over what is forgotten."""
    check_init(job, known)
    module, request, seed = job.model.module, job.request, job.recipe.seed
    choice, needed = layer_choice(job), {**needed_of(job.recipe), "mask": request.mask}

    def read_forget() -> Statistics:
        layers: dict[str, Any] = choice if known is None else {"layers": known}
        return collect(module, request.forget, **layers, **needed, seed=seed, what="forget")

    def read_retain() -> Statistics:
        return collect(module, request.retain, forget, mask=request.mask, seed=seed, what="retain")

    with job.phase("statistics", "reading what is to be forgotten"):
        if known is not None or kept is None:
            forget = read_forget()
        else:
            forget = kept.passed("forget", request.forget, read_forget)
    if known is not None:
        return Gathered(known, pair_of(module, forget, known - forget, job.recipe))
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
    return Gathered(both[0] + both[1], pair_of(module, forget, retain, job.recipe))


def diagnosed(job: Job, found: Gathered) -> Diagnosis:
    """The diagnosis, with a random subset of the retained samples beside it."""
    with job.phase("diagnosis", "looking at the geometry of the request"):
        control = None
        if found.retain.samples > 1:
            options = {"mask": job.request.mask, "forward": None, "seed": job.recipe.seed}
            control = random_control(job.model.module, job.request.retain, found.request, options)
        return diagnose(found.forget, found.retain, job.model.module, job.init, recipe=job.recipe, control=control)


def heed(job: Job, found: Gathered, diagnosis: Diagnosis) -> None:
    """Stop, or warn, where samples that are no whole classes have nothing in common."""
    verdict = diagnosis.verdict
    if verdict.kind != "instance-like" or found.request.classes or job.settings.on_verdict == "ignore":
        return
    if job.settings.on_verdict == "raise":
        raise Refused(f"the request looks {verdict}\nPass --on-verdict warn to edit all the same.")
    job.output.warn("the request looks instance-like; --on-verdict raise refuses such requests.")


def fitted(job: Job, found: Gathered, diagnosis: Diagnosis) -> Edit:
    """The edit; from the data once more where the recipe limits the rows that probes see."""
    limited = job.recipe.limits_rows
    parts = (job.request.forget, job.request.retain) if limited else (found.forget, found.retain)
    with job.phase("edit", "computing the edit"):
        edit = fit(
            job.model.module,
            *parts,
            init=job.init,
            recipe=job.recipe,
            mask=job.request.mask,
            on_verdict="ignore",
            check_init=job.settings.check_init,
        )
    return replace(edit, provenance={**edit.provenance, "verdict": asdict(diagnosis.verdict)})
