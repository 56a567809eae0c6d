"""The four charts of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unmerge.report.drawing import ACCENT, EDITED, FORGET, INK, MUTED, PAPER, RETAIN, Chart, chart_of
from unmerge.report.words import shortened

_DOTS = 400  # beyond so many, a layer's principal angles are drawn as a range
_MARKERS = 80  # beyond so many layers, lines have no points
_SPECTRA = 4
Curve = Sequence[tuple[float, float, float | None]]  # alpha, forget, retain


def alpha_chart(curve: Curve, chosen: float | None, target: float | None, measure: str = "accuracy") -> Chart:
    """Forget and retain measure against alpha, with the corners that place the slider's mark in each shape."""
    alphas = [alpha for alpha, _, _ in curve]
    kept = [(alpha, retain) for alpha, _, retain in curve if retain is not None]

    def draw(figure: Any, wide: bool) -> tuple[float, ...]:
        axes = figure.add_subplot()
        span = (alphas[-1] - alphas[0]) or 1.0
        axes.set_xlim(alphas[0] - 0.03 * span, alphas[-1] + 0.03 * span)
        axes.set_ylim(-4, 106)
        if chosen is not None:
            axes.axvline(chosen, color=INK, linewidth=1.1, linestyle=(0, (2, 2)))
            right = chosen > alphas[0] + 0.6 * span
            axes.annotate(
                f"used: {chosen:g}",
                (chosen, 1),
                (-5 if right else 5, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=9.5,
            )
        if target is not None:
            axes.axhline(100 * target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        # Thin lines between points: only the points were measured.
        forgotten = [(alpha, value) for alpha, value, _ in curve]
        for color, points, marker in ((RETAIN, kept, "s"), (FORGET, forgotten, "o")):
            if points:
                places, values = zip(*points, strict=True)
                shares = [100 * value for value in values]
                axes.plot(places, shares, color=color, linewidth=1.0, linestyle=(0, (4, 2)))
                axes.plot(places, shares, marker, color=color, markeredgecolor=PAPER, markersize=6.5)
        axes.set_xlabel("strength of the edit (alpha)")
        axes.set_title(f"{measure}, %", color=MUTED, fontsize=9.5, pad=18)
        # The page has a legend of its own, beside the values at the slider.
        figure.subplots_adjust(
            left=0.055 if wide else 0.115, right=0.99, top=0.87 if wide else 0.86, bottom=0.16 if wide else 0.19
        )
        height = figure.get_size_inches()[1] * 72
        (x0, y0), (x1, y1) = (axes.transData.transform(corner) for corner in ((alphas[0], 0), (alphas[-1], 100)))
        return tuple(round(float(value), 2) for value in (x0, x1, height - y0, height - y1))

    label = f"Forget and retain {measure} against the strength alpha. The values are in the table below the chart."
    return chart_of("alpha", draw, label, 280, 240)


def profile_chart(layers: Mapping[str, Mapping[str, Any]], control: float | None) -> Chart:
    """Overlap with its band, task-vector norm, captured variance and separability by depth."""
    depth = list(range(1, len(layers) + 1))
    found = list(layers.values())
    edited = [bool(layer["edited"]) for layer in found]
    overlaps = [_mean_and_spread(layer["overlaps"]) for layer in found]

    def draw(figure: Any, wide: bool) -> None:
        rows, columns = (2, 2) if wide else (4, 1)
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel in panels:
            _depth_axis(panel, depth, edited)
        overlap, norm, captured, separable = panels
        means, spreads = zip(*overlaps, strict=True)
        low = [max(0.0, mean - spread) for mean, spread in overlaps]
        high = [min(1.0, mean + spread) for mean, spread in overlaps]
        overlap.fill_between(depth, low, high, color=FORGET, alpha=0.18, linewidth=0)
        if len(depth) == 1:
            overlap.errorbar(depth, means, spreads, color=FORGET, linewidth=1)
        pca_overlap = [layer["separability"]["overlap"] for layer in found]
        pca_captured = [layer["separability"]["captured"] for layer in found]
        for panel, own, pca in (
            (overlap, means, pca_overlap),
            (captured, [layer["captured"] for layer in found], pca_captured),
        ):
            panel.plot(depth, pca, color=MUTED, linewidth=1.0, linestyle=(0, (3, 2)))
            _line(panel, depth, own, FORGET, edited)
            panel.set_ylim(-0.03, 1.05)
        _line(norm, depth, [layer["task_vector_norm"] for layer in found], INK, edited)
        norm.set_ylim(0, 1.1 * max(layer["task_vector_norm"] for layer in found) or 1)
        _line(separable, depth, [score_of(layer) for layer in found], ACCENT, edited)
        if control is not None:
            separable.axhline(control, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
        separable.set_ylim(0, 1.1 * max([control or 0, *(score_of(layer) for layer in found)]) or 1)
        titles = ("Overlap with retain", "Norm of the task vector", "Captured forget variance", "Separability S")
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title)
        for panel in panels[-columns:]:
            panel.set_xlabel("layer, by depth")
        figure.subplots_adjust(
            left=0.06 if wide else 0.135,
            right=0.99,
            top=0.93 if wide else 0.965,
            bottom=0.1 if wide else 0.06,
            wspace=0.16,
            hspace=0.42 if wide else 0.5,
        )

    label = (
        f"Four profiles over {len(layers)} layers, of which {sum(edited)} are edited: overlap of the forget directions "
        "with the retain span, norm of the task vector, captured forget variance, and separability. "
        "The values are in the table below the chart."
    )
    return chart_of("profile", draw, label, 400, 640)


def spectra_chart(layers: Mapping[str, Mapping[str, Any]]) -> Chart:
    """The leading eigenvalues of forget and retain inputs as shares of the variance, on a log scale."""
    names = list(layers)

    def draw(figure: Any, wide: bool) -> None:
        columns = min(2, len(names)) if wide else 1
        rows = math.ceil(len(names) / columns)
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, name in zip(panels, names, strict=False):
            for which, color, marker in (("forget", FORGET, "o"), ("retain", RETAIN, "s")):
                shares = [100 * max(value, 1e-6) for value in layers[name][f"{which}_spectrum"]]
                style = {"markeredgecolor": PAPER, "markersize": 4.2, "linewidth": 1.0}
                panel.plot(range(1, len(shares) + 1), shares, marker + "-", color=color, **style)
            panel.set_yscale("log")
            low, high = panel.get_ylim()
            panel.yaxis.get_major_locator().set_params(subs=(1, 2, 5) if high < 300 * low else (1,))
            panel.minorticks_off()
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set_title(f"layer {shortened(name, 44 if wide else 30)}")
            most = max(len(layers[name][f"{which}_spectrum"]) for which in ("forget", "retain"))
            panel.set_xticks(sorted({1, *range(8, most + 1, 8), most} if most > 8 else range(1, most + 1)))
        for panel in panels[len(names) :]:
            panel.set_visible(False)
        for place in range(len(names)):
            if place + columns >= len(names):
                panels[place].set_xlabel("eigenvalue, largest first")
        height = figure.get_size_inches()[1] * 72
        figure.subplots_adjust(
            left=0.07 if wide else 0.15,
            right=0.99,
            top=1 - 28 / height,
            bottom=40 / height,
            wspace=0.18,
            hspace=0.5 if wide else 0.45,
        )

    wide_rows = math.ceil(len(names) / 2)
    label = (
        "Shares of the variance, in percent, along the leading eigenvectors of the forget and the retain inputs of "
        + ", ".join(name or "(model)" for name in names)
        + "."
    )
    return chart_of("spectra", draw, label, 30 + 190 * wide_rows, 40 + 165 * len(names))


def angle_chart(layers: Mapping[str, Mapping[str, Any]]) -> Chart:
    """The principal angles between forget and retain spans, layer by layer."""
    depth = list(range(1, len(layers) + 1))
    edited = [bool(layer["edited"]) for layer in layers.values()]
    angles = [[math.degrees(math.acos(min(1.0, max(0.0, value)))) for value in layer["cosines"]]
              for layer in layers.values()]  # fmt: skip

    def draw(figure: Any, wide: bool) -> None:
        axes = figure.add_subplot()
        _depth_axis(axes, depth, edited)
        some = [(place, sorted(values)) for place, values in zip(depth, angles, strict=True) if values]
        if some:
            places, values = zip(*some, strict=True)
            lowest, highest = [entry[0] for entry in values], [entry[-1] for entry in values]
            medians = [(place, entry[len(entry) // 2]) for place, entry in some]
            if len(places) > _MARKERS:
                axes.fill_between(places, lowest, highest, color=FORGET, alpha=0.25, linewidth=0)
                axes.plot(*zip(*medians, strict=True), color=FORGET)
            else:
                axes.vlines(places, lowest, highest, color=FORGET, linewidth=3, alpha=0.25)
                every = [(place, value) for place, entry in some for value in entry]
                dots = every if len(every) <= _DOTS else medians
                axes.plot(*zip(*dots, strict=True), "o", color=FORGET, markeredgecolor=PAPER, markersize=6)
        axes.set_ylim(-3, 95)
        axes.set_yticks([0, 30, 60, 90], ["0°", "30°", "60°", "90°"])
        axes.set_xlabel("layer, by depth")
        figure.subplots_adjust(left=0.06 if wide else 0.125, right=0.99, top=0.93, bottom=0.2 if wide else 0.21)

    label = (
        f"Principal angles between the forget and the retain directions in {len(layers)} layers, in degrees. "
        "The values are in the table below the profile."
    )
    return chart_of("angles", draw, label, 220, 220)


def shown_spectra(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """At most four layers, of the edited ones where there are any: the first, the last and some between."""
    names = [name for name, layer in layers.items() if layer["edited"]] or list(layers)
    if len(names) > _SPECTRA:
        step = (len(names) - 1) / (_SPECTRA - 1)
        names = [names[round(place * step)] for place in range(_SPECTRA)]
    return {name: layers[name] for name in names}


def score_of(layer: Mapping[str, Any]) -> float:
    """S of one layer: captured variance outside of what is retained."""
    parts = layer["separability"]
    return float(parts["captured"] * (1 - parts["overlap"]))


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _depth_axis(axes: Any, depth: Sequence[int], edited: Sequence[bool]) -> None:
    """Layers from left to right, the runs of edited ones shaded."""
    axes.set_xlim(0.5, len(depth) + 0.5)
    axes.grid(axis="x", visible=False)
    if len(depth) <= 12:
        axes.set_xticks(depth)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    start = None
    for place, flag in enumerate([*edited, False], 1):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            axes.axvspan(start - 0.5, place - 0.5, color=EDITED, linewidth=0, zorder=0)
            start = None


def _line(axes: Any, depth: Sequence[int], values: Sequence[float], color: str, edited: Sequence[bool]) -> None:
    """A line whose points are full where the layer is edited."""
    axes.plot(depth, values, color=color, linewidth=1.4)
    if len(depth) > _MARKERS:
        return
    size = 5.5 if len(depth) <= 40 else 4
    for flag, fill in ((True, color), (False, PAPER)):
        points = [(place, value) for place, value, own in zip(depth, values, edited, strict=True) if own == flag]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=fill, markeredgecolor=color, markersize=size)
