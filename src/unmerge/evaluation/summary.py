"""The main figure of every axis in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unmerge.evaluation.result import Column, Table

SUMMARY = {  # column of the summary: table and column that it is taken from
    "forget %": ("accuracy", "forget"),
    "retain %": ("accuracy", "retain"),
    "test %": ("accuracy", "test"),
    "ToW": ("accuracy", "ToW"),
    "KL forget": ("fidelity", "KL forget"),
    "feature gap": ("entanglement", "mean gap"),
    "MIA gap": ("membership gaps", "mean |gap|"),
    "probe %": ("decodability", "probe forget"),
    "ECE test": ("calibration", "ECE test"),
    "seconds": ("seconds", "seconds"),
}


def summary(tables: Mapping[str, Table]) -> Table:
    """The main figure of every axis in one table."""
    kept: dict[str, tuple[str, Column]] = {}
    for label, (title, column) in SUMMARY.items():
        source = (
            next((entry for entry in tables[title].columns if entry.label == column), None) if title in tables else None
        )
        if source is not None:
            kept[label] = (title, source)
    first = tables["accuracy"]
    cells = {
        model: {
            label: tables[title].cells[model][source.label]
            for label, (title, source) in kept.items()
            if source.label in tables[title].cells.get(model, {})
        }
        for model in first.cells
    }
    shown = [replace(source, label=label) for label, (_, source) in kept.items()]
    return Table("summary", shown, cells, first.anchors, first.reference)
