"""Renders charts as inline SVG with the page's fonts and colours and with unique ids.

A figure is drawn in placeholder colours, one per role, which are then replaced by CSS variables, so one
drawing serves light and dark pages. It is drawn twice, for wide and narrow screens; CSS shows one of them.
"""

import io
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#000001", "#000002", "#000003", "#000004"
ROLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)"}
WIDE, NARROW = 900, 356  # CSS pixels; at these widths one unit of the drawing is one pixel

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fourbits",  # ids that do not change from one drawing to the next
    "font.size": 12,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "ytick.major.size": 0,
    "xtick.major.size": 4,
    "text.color": INK,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "path.simplify_threshold": 0.5,
}

Draw = Callable[["Figure", bool], None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure as SVG, in its wide and its narrow form."""

    wide: str
    narrow: str
    caption: str | None


def standalone(svg: str, colours: Mapping[str, str]) -> str:
    """An inline drawing as a separate file: colours and fonts resolved, with the page's background.

    colours: value of every CSS variable of a colour, such as --ink.
    """
    view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert view, "a drawing starts at 0 0"
    width, height = view.groups()
    sans = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
    svg = svg.replace("var(--sans)", sans)
    svg = re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], svg)
    size = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    paper = f'<rect width="100%" height="100%" fill="{colours["--paper"]}"/>'
    head, rest = svg.replace("<svg ", size, 1).split(">", 1)
    return f"{head}>{paper}{rest}"


def placeholder(series: int) -> str:
    """The colour to draw a series in; it becomes var(--series-<series>) of the page."""
    return f"#0001{series:02x}"


def chart(draw: Draw, label: str, *, heights: tuple[int, int], caption: str | None) -> Chart:
    """Render a figure. draw(figure, narrow) draws it; heights: of the wide and narrow form, in pixels."""
    wide = _render(draw, WIDE, heights[0], narrow=False, label=label)
    narrow = _render(draw, NARROW, heights[1], narrow=True, label=label)
    return Chart(wide, narrow, caption)


def end_labels(
    axes: "Axes", labels: Sequence[tuple[float, str, str]], *, height: float, pitch: float = 14
) -> None:
    """Label lines at their right end; labels that would overlap are moved apart and connected to their line.

    labels: (y of the line's end, text, colour); height: of the axes, in pixels; pitch: pixels between labels.
    Call this after the limits of the axes are final.
    """
    low, high = axes.get_ylim()
    per_pixel = (high - low) / height
    ends = sorted(labels)
    places = separate([min(max(y, low), high) for y, _, _ in ends], pitch * per_pixel, low, high)
    right = axes.get_xlim()[1]
    for (y, text, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            text,
            xy=(right, min(max(y, low), high)),
            xytext=(16, (place - min(max(y, low), high)) / per_pixel),
            textcoords="offset pixels",
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.7,
                "shrinkA": 0,
                "shrinkB": 1,
                "alpha": 0.6,
            },
        )


def separate(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move sorted positions as little as possible so that neighbours are `gap` apart, within the limits."""
    groups: list[tuple[float, list[float]]] = []
    for place in places:
        members = [place]
        while groups and _bottom(members, gap) < groups[-1][0] + gap * len(groups[-1][1]):
            members = groups.pop()[1] + members
        groups.append((_bottom(members, gap), members))
    moved = [bottom + gap * at for bottom, members in groups for at in range(len(members))]
    excess = max(0.0, moved[-1] - high) if moved else 0.0
    for at in reversed(range(len(moved))):
        ceiling = high - gap * (len(moved) - 1 - at) if excess else np.inf
        moved[at] = min(moved[at], ceiling)
    for at in range(len(moved)):
        moved[at] = max(moved[at], low + gap * at)
    return moved


def _bottom(members: list[float], gap: float) -> float:
    """Position of the lowest member of a group centred on the mean of its members."""
    return float(np.mean(members)) - gap * (len(members) - 1) / 2


@contextmanager
def _style() -> Generator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _render(draw: Draw, width: int, height: int, *, narrow: bool, label: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        draw(figure, narrow)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _adopt(buffer.getvalue(), label, prefix=f"{re.sub('[^a-z]+', '-', label.lower())}-{width}-")


def _adopt(text: str, label: str, prefix: str) -> str:
    """Turn a file written by matplotlib into an inline element."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"#000[01][0-9a-f]{2}\b", lambda found: _colour(found.group()), text)
    # Some releases of matplotlib write one font property, others several.
    text = re.sub(r"(font: (?:bold |\d+ )*[\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", text)
    text = re.sub(r'id="', f'id="{prefix}', text)
    text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{prefix}", text)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view, "matplotlib's SVG has a viewBox"
    head = f'<svg {view.group()} role="img" aria-label="{label}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"<svg.*?>", head, text, count=1, flags=re.DOTALL)


def _colour(found: str) -> str:
    return ROLES.get(found) or f"var(--series-{int(found[5:], 16)})"
