"""What the template shows of a report: every number already in words, every list already chosen."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from unmerge.diagnosing import verdict
from unmerge.report import account, charts, results
from unmerge.report.parts import Report
from unmerge.report.words import (
    FIRST,
    NONE,
    counted,
    number,
    percent,
    shortened,
)

IMAGE_BYTES = 300_000  # of base64 text in one report
_PNG = b"\x89PNG\r\n\x1a\n"


def view(report: Report) -> dict[str, Any]:
    """The values of the template."""
    run, layers = report.run, report.diagnosis["layers"]
    spectra = charts.shown_spectra(layers)
    tables = results.tables(report)
    shown = ("summary",) if any(table["title"] == "summary" for table in tables) else FIRST
    return {
        "model": str(run.get("model", "the model")),
        "init": str(run.get("init", report.edit["provenance"].get("init", NONE))),
        "request": str(run.get("request", "the request")),
        "created": _time(run.get("created")),
        "verdict": _verdict(report),
        "measure": report.measure,
        "outcome": results.outcome(report),
        "removed": results.removed(report),
        "open_tables": [table for table in tables if table["title"] in shown],
        "folded_tables": [table for table in tables if table["title"] not in shown],
        "unmeasured": dict((report.evaluation or {}).get("missing", {})),
        "level": f"{100 * (report.evaluation or {}).get('settings', {}).get('level', 0.95):g}\u202f%",
        "strength": results.strength(report),
        "profile": charts.profile_chart(layers, report.diagnosis["verdict"]["control"]) if layers else None,
        "layers": _layers(report),
        "has_control": report.diagnosis["verdict"]["control"] is not None,
        "edited_layers": counted(len(report.edit["layers"]), "layer"),
        "all_layers": len(layers),
        "basis": str(report.diagnosis["basis"]),
        "spectra": charts.spectra_chart(spectra) if spectra else None,
        "spectra_layers": [
            {"name": name or "(model)", "forget": number(layer["forget_rank"]), "retain": number(layer["retain_rank"])}
            for name, layer in spectra.items()
        ],
        "angles": charts.angle_chart(layers) if layers else None,
        **_samples(run.get("samples") or []),
        "texts": [_text(sample) for sample in run.get("samples") or [] if "text" in sample],
        **account.made(report),
        "limits": account.limits(report),
    }


def _verdict(report: Report) -> dict[str, Any]:
    found = report.diagnosis["verdict"]
    samples = report.diagnosis.get("samples", {})
    ratio = found["ratio"]
    numbers = [
        {
            "name": "Separability S",
            "value": f"{found['separability']:.3f}",
            "hint": f"forget variance outside the retain span; below {verdict.SMALL_SCORE:g} is nearly nothing",
        },
        {
            "name": "Beside a random subset",
            "value": "not measured" if ratio is None else f"{ratio:.1f} ×",
            "hint": "no random subset of the same size was measured"
            if ratio is None
            else f"whose S is {found['control']:.3f}; from {verdict.SEPARABLE_RATIO:g} × on it is more than chance, "
            f"below {verdict.ENTANGLED_RATIO:g} × directions are shared",
        },
        {
            "name": "Shift of the mean",
            "value": f"{number(found['shift'])} ×",
            "hint": f"of what a random draw shows; below {verdict.RANDOM_SHIFT:g} × is chance",
        },
        {
            "name": "Samples read",
            "value": number(samples.get("forget")),
            "hint": f"to forget, beside {number(samples.get('retain'))} to retain",
        },
    ]
    return {"kind": found["kind"], "sentence": found["sentence"], "numbers": numbers}


def _layers(report: Report) -> list[dict[str, Any]]:
    rows = []
    for depth, (name, layer) in enumerate(report.diagnosis["layers"].items(), 1):
        overlaps, gains = layer["overlaps"], layer["gains"]
        mean = sum(overlaps) / len(overlaps) if overlaps else None
        spread = math.sqrt(sum((value - mean) ** 2 for value in overlaps) / len(overlaps)) if mean is not None else None
        angles = [math.degrees(math.acos(min(1.0, max(0.0, value)))) for value in layer["cosines"]]
        rows.append(
            {
                "depth": depth,
                "name": shortened(name, 60),
                "edited": bool(layer["edited"]),
                "rank": report.edit["layers"].get(name, {}).get("rank", ""),
                "cells": [
                    number(layer["features"]),
                    number(layer["task_vector_norm"]),
                    NONE if mean is None else f"{mean:.2f} ± {spread:.2f}",
                    f"{layer['captured']:.3f}",
                    f"{charts.score_of(layer):.3f}",
                    _range(angles, 0, "°"),
                    _range(gains, 2),
                ],
            }
        )
    return rows


def _range(values: list[float], digits: int, unit: str = "") -> str:
    if not values:
        return NONE
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{low}{unit}" if low == high else f"{low}–{high}{unit}"


def _samples(samples: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The images that are PNGs and fit, and how many were left out."""
    pictured = [sample for sample in samples if "text" not in sample]
    shown, size = [], 0
    for sample in pictured:
        image = _png(sample.get("png"))
        if image is None or size + len(image) > IMAGE_BYTES:
            continue
        size += len(image)
        shown.append(
            {
                "png": image,
                "label": str(sample.get("label", "")),
                "before": str(sample.get("before", "")),
                "after": str(sample.get("after", "")),
                "was": percent(sample.get("before_confidence")),
                "now": percent(sample.get("after_confidence")),
                "changed": sample.get("before") != sample.get("after"),
            }
        )
    return {"samples": shown, "samples_left_out": len(pictured) - len(shown)}


def _text(sample: Mapping[str, Any]) -> dict[str, str]:
    """A question with its answer, or a plain text, with what the model said of it."""
    said = {name: str(sample.get(name, "")) for name in ("text", "label", "before", "after")}
    return said | {"was": percent(sample.get("before_confidence")), "now": percent(sample.get("after_confidence"))}


def _png(text: Any) -> str | None:
    """The text again if it is a PNG in base64: what goes into an attribute is not taken on trust."""
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        return None
    return base64.b64encode(data).decode() if data.startswith(_PNG) else None


def _time(created: Any) -> str:
    try:
        return datetime.fromisoformat(str(created).replace("Z", "+00:00")).strftime("%d %B %Y, %H:%M")
    except ValueError:
        return "" if created is None else str(created)
