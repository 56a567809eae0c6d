"""From a matplotlib figure to inline SVG: text stays text, colours are the page's CSS variables."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unmerge.report.extra import MissingExtra

# Stand-ins that matplotlib can draw with; each becomes a variable of the page, which knows light, dark and print.
_VARIABLES = {
    "#010101": "ink",
    "#020202": "muted",
    "#030303": "grid",
    "#040404": "forget",
    "#050505": "retain",
    "#060606": "edited",
    "#070707": "paper",
    "#080808": "accent",
}
INK, MUTED, GRID, FORGET, RETAIN, EDITED, PAPER, ACCENT = _VARIABLES

WIDE, NARROW = 660.0, 262.0  # points: 880 and 350 px
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "unmerge",
    "text.parse_math": False,  # a layer name may hold a dollar sign
    "font.size": 10.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
}


@dataclass(frozen=True)
class Drawing:
    """What stands inside an SVG element of this size; `corners`: x at both ends of the curve, y at 0 and 100 %."""

    width: float
    height: float
    body: str
    corners: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """One chart in two shapes, for a wide page and for a phone, and its description in words."""

    wide: Drawing
    narrow: Drawing
    label: str


Draw = Callable[[Any, bool], Any]  # onto a figure, in the wide shape or the narrow one


def chart_of(name: str, draw: Draw, label: str, wide: float, narrow: float) -> Chart:
    shapes = (_drawing(f"{name}-wide", draw, WIDE, wide), _drawing(f"{name}-narrow", draw, NARROW, narrow))
    return Chart(*shapes, label)


def _drawing(name: str, draw: Draw, width: float, height: float) -> Drawing:
    """What `draw` puts on a figure of this many points."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib") from error
    target = io.StringIO()
    with warnings.catch_warnings(), matplotlib.rc_context():
        # A character that matplotlib's own font lacks is still there for the browser.
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        corners = draw(figure, width == WIDE)
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(target, format="svg", transparent=True, metadata=empty)
    return Drawing(width, height, _cleaned(target.getvalue(), name), corners or ())


def _cleaned(svg: str, name: str) -> str:
    """The drawing alone: own ids, the page's colours and font, two decimals, no metadata."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", inside, flags=re.DOTALL)
    inside = re.sub(r'(?<= )id="', f'id="{name}-', inside)
    inside = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", inside).replace("xlink:href", "href")
    # The page sets the font; only its size is the chart's.
    inside = re.sub(r"font: (?:[a-z]+ )*([\d.]+px)[^;\"]*", r"font-size: \1", inside)
    inside = re.sub(r"font-family:[^;\"]*;?", "", inside)
    inside = re.sub(r'="[^"]*"', lambda part: re.sub(r"\d+\.\d{3,}", _two_decimals, part[0]), inside)
    for color, variable in _VARIABLES.items():
        inside = inside.replace(color, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", inside).strip()


def _two_decimals(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
