"""evaluate(): models beside a retrained one, on several axes at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unmerge.data.batches import Forward, check_rereadable, progress
from unmerge.distributed.processes import same_everywhere, together
from unmerge.distributed.warning import warn
from unmerge.errors import DataError, suggest
from unmerge.evaluation import (
    accuracy,
    calibration,
    decodability,
    entanglement,
    fidelity,
    membership,
    relearning,
)
from unmerge.evaluation.passes import KEEP_FEATURES, outputs
from unmerge.evaluation.predictions import Outputs, aligned, check
from unmerge.evaluation.result import Column, Evaluation, Row, Table
from unmerge.evaluation.samples import shared
from unmerge.evaluation.subject import NO_REFERENCE, Findings, NotMeasurable, Setting, Subject
from unmerge.version import VERSION

# Each has observe(subject, setting, **options), run once a model, and compare(own, retrained, setting) of both views.
AXES: dict[str, Any] = {
    "accuracy": accuracy,
    "entanglement": entanglement,
    "membership": membership,
    "fidelity": fidelity,
    "decodability": decodability,
    "relearning": relearning,
    "calibration": calibration,
}
REFERENCE = "retrained"
FLOOR = "retrained again"


@together
def evaluate(
    models: Mapping[str, nn.Module | Outputs],
    reference: nn.Module | Outputs | None,
    splits: Mapping[str, Iterable[Any]],
    axes: Sequence[str] = tuple(AXES),
    floor: nn.Module | Outputs | None = None,
    *,
    forward: Forward | None = None,
    features: str | None = None,
    keep_features: int = KEEP_FEATURES,
    groups: Mapping[str, tuple[str, Any]] | None = None,
    init: Any = None,
    seed: int = 0,
    draws: int = 1000,
    level: float = 0.95,
    device: torch.device | str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Evaluation:
    """Every axis for every model, beside the retrained model and a second one that shows the noise.

    models: modules, or `Outputs` that were computed before.
    splits: labelled batches of "forget", "retain" and "test"; others (such as "valid") get accuracy and KL too.
    features: the layer with the features: "avgpool" (its output) or "fc:input"; by default the classifier's input.
    groups: name -> (split, classes or a tensor with a mask or indexes), each with its own accuracy.
    init: the weights before fine-tuning ("zero", a state dict, a module or a path), for the task vectors.
    device: where features are compared, such as "cuda"; by default where each model is, for `Outputs` the CPU.
    options: keyword arguments of an axis, such as {"membership": {"mode": "reference"}}.
    """
    if not (isinstance(seed, int) and seed >= 0 and draws >= 1 and 0 < level < 1):
        raise DataError(f"expected seed >= 0, draws >= 1 and level in (0, 1), got {seed!r}, {draws!r} and {level!r}.")
    chosen = _checked_options(axes, options or {})
    setting = Setting(seed, draws, level, splits, forward, groups or {}, init)
    keep = keep_features if any(getattr(AXES[axis], "NEEDS_FEATURES", False) for axis in chosen) else 0
    rows = _rows(models, reference, floor)
    _check_splits(splits, rows, chosen)

    findings: dict[str, dict[str, Findings]] = {axis: {} for axis in chosen}
    first: Outputs
    retrained: Subject | None = None
    observed: dict[str, Any] = {}
    for name, model in progress(rows.items(), "evaluating", len(rows), "model"):
        found = model
        if isinstance(model, nn.Module):
            found = outputs(model, splits, features=features, keep_features=keep, forward=forward, seed=seed, name=name)
        check(found, name)
        if name == next(iter(rows)):
            first = found
            _warn_of_overlap(found)
        subject = Subject(name, aligned(found, first, name), model if isinstance(model, nn.Module) else None, device)
        if reference is not None and name == REFERENCE:
            retrained = subject
        for axis, keywords in chosen.items():
            findings[axis][name] = _measured(AXES[axis], subject, retrained, observed, axis, keywords, setting)
    return same_everywhere(_assembled(findings, rows, first, setting, chosen))


def _measured(
    axis: Any,
    subject: Subject,
    retrained: Subject | None,
    observed: dict[str, Any],
    name: str,
    keywords: Mapping[str, Any],
    setting: Setting,
) -> Findings:
    """What an axis finds of a model, or why it finds nothing; the retrained model's observation is kept."""
    try:
        own = axis.observe(subject, setting, **keywords)
        if subject is retrained:
            observed[name] = own
        found = axis.compare(own, observed.get(name), setting)
    except NotMeasurable as reason:
        found = Findings(missing={"": str(reason)})
    if retrained is not None and name not in observed:
        other = {NO_REFERENCE: "the retrained model could not be measured on this axis"}
        found.missing = {figure: other.get(reason, reason) for figure, reason in found.missing.items()}
    return found


def _rows(
    models: Mapping[str, Any], reference: nn.Module | Outputs | None, floor: nn.Module | Outputs | None
) -> dict[str, Any]:
    """The retrained model first: the others are compared with it."""
    if not isinstance(models, Mapping) or not models:
        raise DataError("models: expected a dict of at least one name and model (or Outputs).")
    if floor is not None and reference is None:
        raise DataError("floor is a second retrained model, compared with the first: pass that as reference.")
    rows = {REFERENCE: reference, FLOOR: floor}
    clash = [name for name in models if name in rows]
    if clash:
        raise DataError(f"models: the name {clash[0]!r} is that of a row of its own. Choose another.")
    rows = {name: model for name, model in rows.items() if model is not None} | dict(models)
    for name, model in rows.items():
        if not isinstance(model, (nn.Module, Outputs)):
            raise DataError(f"model {name!r} is a {type(model).__name__}; expected an nn.Module or Outputs.")
    return rows


def _check_splits(splits: Mapping[str, Iterable[Any]], rows: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    if not isinstance(splits, Mapping):
        raise DataError(f"splits is a {type(splits).__name__}; expected a dict such as {{'forget': loader, ...}}.")
    modules = sum(isinstance(model, nn.Module) for model in rows.values())
    if modules and not splits:
        raise DataError("splits is empty; expected labelled batches under some of 'forget', 'retain' and 'test'.")
    for name, data in splits.items():
        if modules > 1 or (name == "forget" and "relearning" in chosen):
            check_rereadable(data, f"split {name!r}", "an evaluation of several models, or with relearning,")


def _checked_options(axes: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    axes = [axes] if isinstance(axes, str) else list(axes)
    for axis in [*axes, *options]:
        if axis not in AXES:
            raise DataError(f"there is no axis {axis!r}. {suggest(axis, AXES)}")
    for axis, keywords in options.items():
        known = list(inspect.signature(AXES[axis].observe).parameters)[2:]
        for keyword in keywords:
            if keyword not in known:
                raise DataError(f"axis {axis!r} has no option {keyword!r}. {suggest(keyword, known)}")
    return {axis: options.get(axis, {}) for axis in AXES if axis in axes}


def _warn_of_overlap(found: Outputs) -> None:
    names = [name for name in ("forget", "retain", "test") if name in found.splits]
    for place, name in enumerate(names):
        for other in names[place + 1 :]:
            count = shared(found[name].keys, found[other].keys)
            if count:
                warn(f"{count} of the {len(found[name])} samples of split {name!r} are in split {other!r} too.")


def _assembled(
    findings: Mapping[str, Mapping[str, Findings]],
    rows: Mapping[str, Any],
    first: Outputs,
    setting: Setting,
    chosen: Mapping[str, Mapping[str, Any]],
) -> Evaluation:
    """All rows as tables; a reason that holds for every model is given once."""
    anchors = [name for name in (REFERENCE, FLOOR) if name in rows]
    tables: dict[str, Table] = {}
    missing: dict[str, str] = {}
    examples = {}
    for axis, by_model in findings.items():
        titled: dict[str, dict[str, Row]] = {}
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, found in by_model.items():
            for title, row in found.rows.items():
                titled.setdefault(title, {})[name] = row
            for figure, reason in found.missing.items():
                reasons.setdefault((figure, reason), []).append(name)
            if found.examples:
                examples[name] = found.examples
        for title, own_rows in titled.items():
            columns: dict[str, Column] = {}
            for row in own_rows.values():
                for column in row:
                    columns.setdefault(column.label, column)
            cells = {name: {column.label: figure for column, figure in row.items()} for name, row in own_rows.items()}
            reference = REFERENCE if REFERENCE in rows else None
            tables[title] = Table(title, list(columns.values()), cells, anchors, reference)
        for (figure, reason), names in reasons.items():
            what = f"{axis}: {figure}" if figure else axis
            missing[what if len(names) == len(by_model) else f"{what} of {', '.join(names)}"] = reason
    settings = {
        "seed": setting.seed,
        "draws": setting.draws,
        "level": setting.level,
        "axes": list(chosen),
        "options": {
            axis: {key: _plain(value) for key, value in given.items()} for axis, given in chosen.items() if given
        },
        "models": list(rows),
        "feature_layer": first.feature_layer,
        "samples": {split: len(part) for split, part in first.splits.items()},
        "unmerge": VERSION,
    }
    return Evaluation(tables, missing, settings, examples)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, range)) else value
