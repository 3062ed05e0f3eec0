"""The result of a comparison in one picture: the gap of every recipe with its interval, as an SVG file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fourbits.compare.number_format import signed
from fourbits.compare.report.colours import light_values
from fourbits.compare.report.svg import INK, MUTED, RULE, chart, placeholder, standalone
from fourbits.compare.report.table import Row
from fourbits.data.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = "gaps.svg"
#: pixels of a row, and of what is above and below the rows
_ROW, _FRAME = 34, 66


def write_gaps(rows: Sequence[Row], baseline: str, title: str, path: Path) -> bool:
    """Write the gaps to the baseline, with 95 % intervals, from the smallest to the largest, as an SVG file.

    title: of the picture. Returns whether there was a gap with an interval to draw, from two seeds or more.
    """
    shown = [row for row in rows if row.recipe != baseline and row.gap_nats_margin is not None]
    shown.sort(key=lambda row: row.gap_nats or 0.0)
    if not shown:
        return False
    names = [baseline, *(row.recipe for row in rows if row.recipe != baseline)]
    height = _FRAME + _ROW * len(shown)

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(
            left=0.4 if narrow else 0.3, right=0.8, top=1 - 40 / height, bottom=22 / height
        )
        axes.set_title(title, loc="left", x=-0.55, fontsize=12, color=INK, pad=14)
        for place, row in enumerate(shown):
            _draw_gap(axes, -place, row, placeholder(names.index(row.recipe)))
        axes.axvline(0, color=RULE, lw=1)
        axes.set_ylim(-len(shown) + 0.4, 0.6)
        axes.set_yticks([])
        axes.locator_params(axis="x", nbins=5)

    drawn = chart(draw, title, heights=(height, height), caption=None)
    write_whole(path, standalone(drawn.wide, light_values(names)).encode())
    return True


def _draw_gap(axes: "Axes", place: float, row: Row, colour: str) -> None:
    """A bar with its interval, the recipe at its left and the numbers at its right."""
    gap, margin = row.gap_nats or 0.0, row.gap_nats_margin or 0.0
    axes.barh(place, gap, height=0.5, color=colour, alpha=0.35, lw=0)
    axes.errorbar(gap, place, xerr=margin, fmt="o", ms=6, color=colour, capsize=4, lw=2)
    for text, end, shift, side, ink in (
        (row.recipe, 0, -8, "right", INK),
        (signed(gap, 4, margin), 1, 8, "left", MUTED),
    ):
        axes.annotate(
            text,
            xy=(end, place),
            xycoords=("axes fraction", "data"),
            xytext=(shift, 0),
            textcoords="offset pixels",
            ha=side,
            va="center",
            color=ink,
            fontsize=11,
            annotation_clip=False,
        )
