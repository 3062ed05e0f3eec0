"""Draws four small charts of the errors that each technique fixes: scales, SR, 2D scaling, RHT."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fourbits.compare.number_format import percent
from fourbits.compare.report.svg import INK, MUTED, PAPER, RULE, Chart, chart, placeholder
from fourbits.compare.report.technique_summary import Bar, rounding_bars, scale_bars, weight_bars
from fourbits.compare.techniques.findings import Techniques, TransformEffect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: longer bars end at the edge; their text has the value
LONGEST = 0.2
TITLES = (
    ("Block and tensor scales", "error of the largest of every 16 elements"),
    ("Stochastic rounding", "error of dY"),
    ("2D scaling", "W in nvfp4"),
    ("Random Hadamard transform (RHT)", "error of dW with RHT / without; a dot per layer"),
)
# Margins of the axes, as shares of the figure; the left margin holds the labels of the bars.
WIDE = {"left": 0.185, "right": 0.975, "top": 0.905, "bottom": 0.055, "wspace": 0.62, "hspace": 0.42}
NARROW = {"left": 0.43, "right": 0.93, "top": 0.953, "bottom": 0.035, "hspace": 0.36}


def technique_chart(found: Techniques, series: Mapping[str, int]) -> Chart:
    """All four charts as one figure. series: recipe -> index of its colour."""
    panels = (scale_bars(found), rounding_bars(found), weight_bars(found))
    tallest = max(len(panels[0]), len(panels[1])), max(len(panels[2]), 5)

    def draw(figure: "Figure", narrow: bool) -> None:
        if narrow:
            heights = [len(panel) for panel in panels] + [5]
            axes = figure.subplots(4, 1, gridspec_kw={"height_ratios": heights})
            figure.subplots_adjust(**NARROW)
        else:
            axes = figure.subplots(2, 2, gridspec_kw={"height_ratios": tallest}).flatten()
            figure.subplots_adjust(**WIDE)
        for each, panel in zip(axes, panels, strict=False):
            _draw_bars(each, panel, series)
        _draw_ratios(axes[3], found.transforms, series)
        for each, (title, subtitle) in zip(axes, TITLES, strict=True):
            _title(each, title, subtitle)

    caption = (
        "Relative errors on one trained BF16 model, means over its linear layers. X: activations, W: "
        "weights, dY: gradients of outputs, dW: gradients of weights."
    )
    return chart(draw, "What each technique fixes", heights=(500, 900), caption=caption)


def _draw_bars(axes: "Axes", bars: Sequence[Bar], series: Mapping[str, int]) -> None:
    """Horizontal bars from the top, with labels at the left and values at the right."""
    for row, bar in enumerate(bars):
        _label(axes, row, bar.label, is_heading=bar.value is None)
        if bar.value is None:
            continue
        length = min(bar.value, LONGEST)
        axes.barh(-row, length, height=0.66, color=placeholder(series[bar.recipe]))
        if bar.value > LONGEST:  # the gap marks a bar that is longer than drawn
            axes.plot([0.93 * length, 0.95 * length], [-row - 0.45, -row + 0.45], color=PAPER, lw=3)
        axes.annotate(
            percent(bar.value),
            xy=(length, -row),
            xytext=(4, 0),
            textcoords="offset pixels",
            va="center",
            color=INK,
            fontsize=11,
            annotation_clip=False,
        )
    axes.set_xlim(0, LONGEST * 1.12)
    axes.set_ylim(-len(bars) + 0.4, 0.6)
    axes.grid(visible=False)
    axes.axvline(0, color=RULE, lw=1)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_ratios(axes: "Axes", effects: Sequence[TransformEffect], series: Mapping[str, int]) -> None:
    """A dot per layer, a row per recipe; right of the line at 1 the transform does harm."""
    names = list(dict.fromkeys(each.recipe for each in effects))[::-1]
    for row, name in enumerate(names):
        ratios = [each.ratio for each in effects if each.recipe == name]
        colour = placeholder(series[name])
        axes.plot(ratios, [-row] * len(ratios), ls="", marker="o", ms=6, color=colour, alpha=0.55, mew=0)
        _label(axes, row, name, is_heading=True)
    axes.axvline(1, color=MUTED, lw=1.1)
    reach = max(0.25, *(abs(each.ratio - 1) for each in effects)) * 1.08
    axes.set_xlim(1 - reach, 1 + reach)
    axes.set_ylim(-len(names) + 0.2, 0.8)
    axes.set_yticks([])
    axes.grid(visible=False)
    for text, place, side in (("helps", -6, "right"), ("does harm", 6, "left")):
        axes.annotate(
            text,
            xy=(1, 0.5),
            xytext=(place, 0),
            textcoords="offset pixels",
            ha=side,
            va="center",
            color=MUTED,
            fontsize=11,
        )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _label(axes: "Axes", row: int, text: str, *, is_heading: bool) -> None:
    """The label of a row, left of the axes."""
    axes.annotate(
        text,
        xy=(0, -row),
        xycoords=("axes fraction", "data"),
        xytext=(-6, 0),
        textcoords="offset pixels",
        ha="right",
        va="center",
        color=INK if is_heading else MUTED,
        fontsize=11,
        fontweight="bold" if is_heading else "normal",
    )


def _title(axes: "Axes", title: str, subtitle: str) -> None:
    """Title and subtitle above the labels of the bars, at the left of both."""
    for text, place, weight, colour, size in (
        (title, 22, "bold", INK, 12.5),
        (subtitle, 7, "normal", MUTED, 11),
    ):
        axes.annotate(
            text,
            xy=(0, 1),
            xycoords="axes fraction",
            xytext=(-150, place),
            textcoords="offset pixels",
            color=colour,
            fontsize=size,
            fontweight=weight,
            annotation_clip=False,
        )
