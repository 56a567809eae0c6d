"""How an edit was made, and what it does not do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from unmerge.recipe import Recipe
from unmerge.report.parts import Report
from unmerge.report.results import AFTER
from unmerge.report.words import percent, seconds, setting


def made(report: Report) -> dict[str, Any]:
    provenance = report.edit["provenance"]
    phases = dict(report.run.get("seconds") or {})
    longest = max((value for value in phases.values()), default=0) or 1
    meanings = {entry.name: entry.metadata.get("meaning", "") for entry in fields(Recipe)}
    choices = provenance.get("choices", {})
    recipe = [
        {
            "name": name,
            "value": setting(value),
            "about": choices.get(name) or meanings.get(name, ""),
            "chosen": name in choices,
        }
        for name, value in report.edit["recipe"].items()
    ]
    versions = {name: provenance[name] for name in ("unmerge", "torch", "python", "device") if name in provenance}
    return {
        "command": str(report.run.get("command", "")),
        "recipe": recipe,
        "versions": versions | dict(report.run.get("versions") or {}),
        "hashes": dict(report.edit.get("weights", {})),
        "phases": [
            {"name": name, "seconds": seconds(value), "share": max(1, round(100 * value / longest))}
            for name, value in phases.items()
        ],
        "inside": ", ".join(f"{name} {seconds(value)}" for name, value in provenance.get("seconds", {}).items()),
        "total": seconds(sum(phases.values())) if phases else "",
        "notes": _notes(provenance.get("notes", {})),
    }


def _notes(notes: Mapping[str, Any]) -> list[str]:
    """What the fit left out or did otherwise than asked."""
    said = [f"{name or '(model)'} was left out: {why}" for name, why in (notes.get("left_out") or {}).items()]
    for key, words in (
        ("spanned_by_retain", "has no direction that the retained data lacks, so it is not edited"),
        ("mean_left_free", "has no place for a constant, so its mean response moves"),
    ):
        said += [f"{name or '(model)'} {words}" for name in notes.get(key) or []]
    said += [f"{name}: rank reduced to {rank}" for name, rank in (notes.get("rank_reduced") or {}).items()]
    if notes.get("head_not_removed"):
        said.append(f"no output of the classifier was removed: {notes['head_not_removed']}")
    return said + [f"approximation: {note}" for note in notes.get("approximations") or []]


def _weak_proof(measure: str) -> tuple[str, str]:
    if measure == "accuracy":
        why = (
            "A mask on the outputs has the same accuracy and changes no feature. Compare features with a retrained "
            "model or with that mask before you rely on the edit."
        )
    else:
        why = (
            "The model may still know an answer that it no longer gives in these words. Ask otherwise, and compare "
            "with a model that was fine-tuned without the data."
        )
    return f"Low {measure} alone is a weak proof.", why


def limits(report: Report) -> list[tuple[str, str]]:
    """What the edit does not do, with this run's own numbers where it has them."""
    kind = report.diagnosis["verdict"]["kind"]
    rows = (report.evaluation or {}).get("tables", {}).get("decodability", {}).get("rows", {})
    probes = {name: row.get("probe forget", {}).get("value") for name, row in rows.items()}
    edited = next((probes[name] for name in AFTER if probes.get(name) is not None), None)
    retrained = probes.get("retrained")
    probe = "A linear probe on the features may still find what was removed; it is not erased from every layer."
    if edited is not None:
        probe = f"A new linear probe on the frozen features labels {percent(edited)} of held-out forget samples right"
        probe += f" (retrained model: {percent(retrained)})." if retrained is not None else "."
        probe += " What a probe finds is still in the features, whatever the outputs say."
    limits = [
        (
            "Not certified deletion.",
            "The edit comes close to a model that was trained without the data, and proves nothing. Only training "
            "again without the data is certain.",
        ),
        ("Features may still tell.", probe),
        (
            "Measured on the data that was given.",
            "Samples of the same concept that look different may be treated differently. Try the edited model on data "
            "that neither the edit nor the search for alpha has seen.",
        ),
        _weak_proof(report.measure),
        (
            "It can be undone.",
            "Whoever has the original checkpoint or the edit file has what was removed. The file of statistics and the "
            "edit derive from the data: keep them as you keep the data.",
        ),
    ]
    if kind == "entangled":
        limits.insert(0, ("This request is entangled.", "Expect retained classes that look alike to lose accuracy."))
    if kind == "instance-like":
        limits.insert(
            0,
            ("This request is a set of samples, not a concept.", "An edit of directions is the wrong tool for it."),
        )
    return limits
