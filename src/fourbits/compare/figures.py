"""The charts of a report: loss, its gap to the baseline, and the course of a single run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fourbits.compare.html import Markup
from fourbits.compare.svg import INK, MUTED, RULE, chart, end_labels, placeholder, tokens_label
from fourbits.compare.words import MINUS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

# The part of a run shown enlarged: where curves that start alike have come apart.
ENLARGED_FROM = 0.6
# While the loss still falls by nats, a gap says little: axes are fitted to what comes after this share.
SETTLED_FROM = 0.15
LARGEST_GAP = 25.0
FAINT = 0.35

# Margins of the axes, as shares of the figure; the right one holds the names of the lines.
WIDE_PAIR = {"left": 0.036, "right": 0.87, "top": 0.89, "bottom": 0.12, "wspace": 0.13}
NARROW_PAIR = {"left": 0.1, "right": 0.74, "top": 0.95, "bottom": 0.06, "hspace": 0.36}
WIDE_ONE = {"left": 0.052, "right": 0.87, "top": 0.95, "bottom": 0.12}
NARROW_ONE = {"left": 0.12, "right": 0.74, "top": 0.95, "bottom": 0.12}
WIDE_COURSE = {"left": 0.052, "right": 0.87, "top": 0.82, "bottom": 0.18}
NARROW_COURSE = {"left": 0.17, "right": 0.97, "top": 0.83, "bottom": 0.16}


@dataclass(frozen=True, slots=True)
class Line:
    """A curve over training, with the number of the series whose colour it has.

    tokens, value: [n], and n may be 0; low, high: [n], the range over seeds, None for one seed.
    """

    name: str
    number: int
    tokens: Array
    value: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True, slots=True)
class LossCurves:
    """What the loss chart shows: a validation and a smoothed training curve per recipe, in report order.

    switches: training tokens at which the data change to a new phase.
    """

    validation: Sequence[Line]
    train: Sequence[Line]
    unigram_entropy: float | None
    switches: Sequence[float]


@dataclass(frozen=True, slots=True)
class GapCurves:
    """What the gap chart shows: curves of all recipes but the baseline, which is the zero line."""

    baseline: str
    validation: Sequence[Line]
    train: Sequence[Line]
    switches: Sequence[float]


def loss_chart(curves: LossCurves) -> Markup:
    """The whole run, and the validation loss of its last part enlarged."""

    def draw(figure: "Figure", narrow: bool) -> None:
        rows, columns = (2, 1) if narrow else (1, 2)
        ratios = {"height_ratios": [1, 1.35]} if narrow else {"width_ratios": [1, 1.15]}
        whole, part = figure.subplots(rows, columns, gridspec_kw=ratios)
        figure.subplots_adjust(**(NARROW_PAIR if narrow else WIDE_PAIR))
        for line in curves.train:
            _plot_faint(whole, line)
        for axes in (whole, part):
            for line in curves.validation:
                _plot(axes, line)
            _token_axis(axes, 3 if narrow else 4)
        _mark_entropy(whole, curves.unigram_entropy)
        _enlarge(part, curves.validation)
        whole.set_title("Whole run")
        part.set_title(f"Last {1 - ENLARGED_FROM:.0%}, validation")
        _mark_switches(whole, curves.switches, short=True)
        _mark_switches(part, curves.switches, short=narrow)
        _name_ends(part, curves.validation)

    caption = (
        "Cross-entropy in nats per token, against training tokens. Strong: validation. Faint: training, "
        "running mean. Dotted: a new phase of the data begins, which moves the training loss."
    )
    return chart(draw, "Loss over training", heights=(330, 560), caption=caption)


def gap_chart(curves: GapCurves) -> Markup:
    """Relative gap to the baseline in per cent against tokens, as arXiv:2509.25149 shows it in section 3."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**(NARROW_ONE if narrow else WIDE_ONE))
        for line in curves.train:
            _plot_faint(axes, line)
        for line in curves.validation:
            _plot(axes, line, marker="o")
        axes.set_ylim(*_settled_limits([*curves.validation, *curves.train]))
        axes.axhline(0, color=MUTED, lw=1.2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %".replace("-", MINUS))
        _token_axis(axes, 3 if narrow else 6)
        _mark_switches(axes, curves.switches, short=narrow)
        _name_ends(axes, curves.validation, (0.0, curves.baseline, MUTED))

    caption = (
        f"Loss above {curves.baseline} in per cent of it, against training tokens. Strong: validation. "
        "Faint: training, on the same batches, running mean."
    )
    return chart(draw, "Relative gap over training", heights=(330, 330), caption=caption)


def run_loss_chart(steps: Line, train: Line, validation: Line, switches: Sequence[float]) -> Markup:
    """The loss of one run: every step, the running mean of them, and the validation loss if there is any."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**(NARROW_ONE if narrow else WIDE_ONE))
        _plot_faint(axes, steps)
        _plot(axes, train)
        ends: list[tuple[float, str, str]] = []
        if len(validation.tokens):
            axes.plot(validation.tokens, validation.value, color=INK, lw=1.6, marker="o", ms=3.5)
            ends.append((float(validation.value[-1]), validation.name, INK))
        _token_axis(axes, 3 if narrow else 6)
        _mark_switches(axes, switches, short=narrow)
        _name_ends(axes, [train], *ends)

    caption = (
        "Cross-entropy in nats per token, against training tokens. Training: running mean over the steps."
    )
    return chart(draw, "Loss", heights=(330, 300), caption=caption)


def course_chart(title: str, line: Line, *, log: bool = False) -> Markup:
    """One quantity of one run over training, such as the learning rate."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**(NARROW_COURSE if narrow else WIDE_COURSE))
        axes.plot(line.tokens, line.value, color=placeholder(line.number), lw=1.4)
        if log:
            _log_axis(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(title)
        _token_axis(axes, 3 if narrow else 6)

    return chart(draw, title, heights=(180, 190), caption=None)


def _plot(axes: "Axes", line: Line, marker: str | None = None) -> None:
    colour = placeholder(line.number)
    if line.low is not None and line.high is not None:
        axes.fill_between(line.tokens, line.low, line.high, color=colour, alpha=0.15, lw=0)
    axes.plot(line.tokens, line.value, color=colour, lw=1.8, marker=marker, ms=3.5)


def _plot_faint(axes: "Axes", line: Line) -> None:
    axes.plot(line.tokens, line.value, color=placeholder(line.number), lw=1.0, alpha=FAINT)


def _mark_entropy(axes: "Axes", entropy: float | None) -> None:
    if entropy is None:
        return
    axes.axhline(entropy, color=MUTED, lw=1.1, ls=(0, (4, 3)))
    axes.annotate(
        f"unigram entropy {entropy:.2f}",
        xy=(1, entropy),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset pixels",
        ha="right",
        va="bottom",
        color=MUTED,
        fontsize=11,
    )


def _mark_switches(axes: "Axes", switches: Sequence[float], *, short: bool) -> None:
    for phase, tokens in enumerate(switches, start=2):
        if axes.get_xlim()[0] < tokens < axes.get_xlim()[1]:
            axes.axvline(tokens, color=RULE, lw=1, ls=(0, (2, 2)), zorder=0)
            axes.annotate(
                str(phase) if short else f"phase {phase}",
                xy=(tokens, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -2),
                textcoords="offset pixels",
                va="top",
                color=MUTED,
                fontsize=10.5,
            )


def _enlarge(axes: "Axes", lines: Sequence[Line]) -> None:
    """Limits around what the last part of the run holds; a run that was lost does not flatten the others."""
    end = max((float(line.tokens[-1]) for line in lines if len(line.tokens)), default=1.0)
    start = ENLARGED_FROM * end
    shown = [line for line in lines if len(line.tokens)]
    at_start = [np.interp(start, line.tokens, line.value, left=np.nan) for line in shown]
    values = np.concatenate([at_start, *(line.value[line.tokens >= start] for line in shown)])
    values = values[np.isfinite(values)]
    axes.set_xlim(start, end)
    if values.size:
        low, high = float(values.min()), float(min(values.max(), 1.5 * np.median(values)))
        room = max(0.1 * (high - low), 1e-3)
        axes.set_ylim(low - room, high + room)


def _settled_limits(lines: Sequence[Line]) -> tuple[float, float]:
    end = max((float(line.tokens[-1]) for line in lines if len(line.tokens)), default=0.0)
    values = np.concatenate([np.zeros(1), *(line.value[line.tokens >= SETTLED_FROM * end] for line in lines)])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(min(values.max(), LARGEST_GAP))
    room = max(0.08 * (high - low), 0.05)
    return low - room, high + room


def _name_ends(axes: "Axes", lines: Sequence[Line], *others: tuple[float, str, str]) -> None:
    """Names at the ends of the lines that have one; others: (y, name, colour) of what is no Line."""
    ends = [(float(line.value[-1]), line.name, placeholder(line.number)) for line in lines if len(line.value)]
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes that are drawn on belong to a figure"
    height = axes.get_position().height * figure.get_figheight() * 72
    end_labels(axes, [end for end in (*ends, *others) if np.isfinite(end[0])], height=height)


def _log_axis(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _token_axis(axes: "Axes", ticks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: tokens_label(value))
    axes.margins(x=0)
    axes.tick_params(axis="x", length=0)
