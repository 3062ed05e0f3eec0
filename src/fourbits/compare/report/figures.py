"""The charts of a report: loss, gap to the baseline, and the training metrics of a single run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourbits.compare.number_format import MINUS, short_count
from fourbits.compare.report.curves import Line
from fourbits.compare.report.svg import (
    INK,
    MUTED,
    RULE,
    Chart,
    chart,
    end_labels,
    placeholder,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The last part of a run is also shown enlarged, because by then curves that start alike have separated.
ENLARGED_FROM = 0.6
# Gaps say little while the loss falls fast, so axis limits are fitted to the rest after this share of the
# run.
SETTLED_FROM = 0.15
LARGEST_GAP = 25.0
LIGHT_ALPHA = 0.35
_CAPTION_OF_SWITCHES = " Vertical lines: the precision changes by the recipe's schedule."

# Margins of the axes, as shares of the figure; the right margin holds the names of the lines.
WIDE_PAIR = {"left": 0.036, "right": 0.87, "top": 0.89, "bottom": 0.12, "wspace": 0.13}
NARROW_PAIR = {"left": 0.1, "right": 0.74, "top": 0.95, "bottom": 0.06, "hspace": 0.36}
WIDE_ONE = {"left": 0.052, "right": 0.87, "top": 0.95, "bottom": 0.12}
NARROW_ONE = {"left": 0.12, "right": 0.74, "top": 0.95, "bottom": 0.12}
WIDE_METRIC = {"left": 0.052, "right": 0.87, "top": 0.82, "bottom": 0.18}
NARROW_METRIC = {"left": 0.17, "right": 0.97, "top": 0.83, "bottom": 0.16}


#: training tokens at which a schedule changes the precision, and the name of the phase that begins or ends
Switch = tuple[float, str]


@dataclass(frozen=True, slots=True)
class LossCurves:
    """A validation and a smoothed training curve per recipe, in report order.

    phase_starts: training tokens at which a new phase of the data begins.
    """

    validation: Sequence[Line]
    train: Sequence[Line]
    unigram_entropy: float | None
    phase_starts: Sequence[float]
    switches: Sequence[Switch] = ()


@dataclass(frozen=True, slots=True)
class GapCurves:
    """Gap curves of all recipes but the baseline, which is the zero line."""

    baseline: str
    validation: Sequence[Line]
    train: Sequence[Line]
    phase_starts: Sequence[float]
    switches: Sequence[Switch] = ()


def loss_chart(curves: LossCurves) -> Chart:
    """The loss over the whole run, and the validation loss over its last part enlarged."""

    def draw(figure: "Figure", narrow: bool) -> None:
        rows, columns = (2, 1) if narrow else (1, 2)
        ratios = {"height_ratios": [1, 1.35]} if narrow else {"width_ratios": [1, 1.15]}
        whole, part = figure.subplots(rows, columns, gridspec_kw=ratios)
        figure.subplots_adjust(**(NARROW_PAIR if narrow else WIDE_PAIR))
        for line in curves.train:
            _plot_light(whole, line)
        for axes in (whole, part):
            for line in curves.validation:
                _plot(axes, line)
            _token_axis(axes, 3 if narrow else 4)
        _mark_entropy(whole, curves.unigram_entropy)
        _enlarge(part, curves.validation)
        whole.set_title("Whole run")
        part.set_title(f"Last {1 - ENLARGED_FROM:.0%}, validation")
        _mark_phases(whole, curves.phase_starts, short=True)
        _mark_phases(part, curves.phase_starts, short=narrow)
        for axes in (whole, part):
            _mark_switches(axes, curves.switches)
        _label_ends(part, curves.validation)

    caption = (
        "Cross-entropy (nats per token) over training tokens. Solid: validation. Light: training, running "
        "mean."
    )
    if curves.phase_starts:
        caption += " Dotted: a new data phase begins, which shifts the training loss."
    caption += _caption_of(curves.validation, curves.switches)
    return chart(draw, "Loss over training", heights=(330, 560), caption=caption)


def gap_chart(curves: GapCurves) -> Chart:
    """Relative gap to the baseline [%] over tokens, as in section 3 of arXiv:2509.25149."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**(NARROW_ONE if narrow else WIDE_ONE))
        for line in curves.train:
            _plot_light(axes, line)
        for line in curves.validation:
            _plot(axes, line, marker="o")
        axes.set_ylim(*_settled_limits([*curves.validation, *curves.train]))
        axes.axhline(0, color=MUTED, lw=1.2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %".replace("-", MINUS))
        _token_axis(axes, 3 if narrow else 6)
        _mark_phases(axes, curves.phase_starts, short=narrow)
        _mark_switches(axes, curves.switches)
        _label_ends(axes, curves.validation, (0.0, curves.baseline, MUTED))

    caption = (
        f"Loss gap to {curves.baseline} (%) over training tokens. Solid: validation. Light: training on the "
        "same batches, running mean."
    )
    caption += _caption_of(curves.validation, curves.switches)
    return chart(draw, "Relative gap over training", heights=(330, 330), caption=caption)


def _caption_of(lines: Sequence[Line], switches: Sequence[Switch]) -> str:
    """The part of a caption about bands and vertical lines, if there are any."""
    bands = " Shaded: range over seeds." if any(line.low is not None for line in lines) else ""
    return bands + (_CAPTION_OF_SWITCHES if switches else "")


def run_loss_chart(
    steps: Line,
    train: Line,
    validation: Line,
    phase_starts: Sequence[float],
    switches: Sequence[Switch] = (),
) -> Chart:
    """The loss of one run: every training step, their running mean, and the validation loss if any."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**(NARROW_ONE if narrow else WIDE_ONE))
        _plot_light(axes, steps)
        _plot(axes, train)
        ends: list[tuple[float, str, str]] = []
        if len(validation.tokens):
            axes.plot(validation.tokens, validation.value, color=INK, lw=1.6, marker="o", ms=3.5)
            ends.append((float(validation.value[-1]), validation.name, INK))
        _token_axis(axes, 3 if narrow else 6)
        _mark_phases(axes, phase_starts, short=narrow)
        _mark_switches(axes, switches)
        _label_ends(axes, [train], *ends)

    caption = "Cross-entropy (nats per token) over training tokens. Training: each step, and running mean."
    caption += _CAPTION_OF_SWITCHES if switches else ""
    return chart(draw, "Loss", heights=(330, 300), caption=caption)


def metric_chart(title: str, line: Line, *, log: bool = False) -> Chart:
    """One metric of one run over training, such as the learning rate."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**(NARROW_METRIC if narrow else WIDE_METRIC))
        axes.plot(line.tokens, line.value, color=placeholder(line.series), lw=1.4)
        if log:
            _log_axis(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(title)
        _token_axis(axes, 3 if narrow else 6)

    return chart(draw, title, heights=(180, 190), caption=None)


def sampled_chart(title: str, lines: Sequence[Line], limit: float | None) -> Chart:
    """Several metrics of one run at a few points in training. limit: a level to mark."""

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(**{**(NARROW_ONE if narrow else WIDE_ONE), "top": 0.83, "bottom": 0.17})
        for line in lines:
            _plot(axes, line, marker="o")
        if limit is not None:
            axes.axhline(limit, color=MUTED, lw=1.1, ls=(0, (4, 3)))
        axes.set_ylim(bottom=0)
        axes.set_title(title if not narrow else title.partition(" (")[0])
        _token_axis(axes, 3 if narrow else 6)
        _label_ends(axes, lines, *([] if limit is None else [(limit, f"alarm {limit:.3g}", MUTED)]))

    return chart(draw, title, heights=(200, 220), caption=None)


def _plot(axes: "Axes", line: Line, marker: str | None = None) -> None:
    colour = placeholder(line.series)
    if line.low is not None and line.high is not None:
        axes.fill_between(line.tokens, line.low, line.high, color=colour, alpha=0.15, lw=0)
    marker = marker or (
        "o" if np.isfinite(line.value).sum() == 1 else None
    )  # one point is not visible as a line
    axes.plot(line.tokens, line.value, color=colour, lw=1.8, marker=marker, ms=3.5)


def _plot_light(axes: "Axes", line: Line) -> None:
    axes.plot(line.tokens, line.value, color=placeholder(line.series), lw=1.0, alpha=LIGHT_ALPHA)


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


def _mark_phases(axes: "Axes", phase_starts: Sequence[float], *, short: bool) -> None:
    for phase, tokens in enumerate(phase_starts, start=2):
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


def _mark_switches(axes: "Axes", switches: Sequence[Switch]) -> None:
    """Draw a line for each phase of the precision schedule, with its name along the line."""
    for tokens, name in switches:
        if axes.get_xlim()[0] < tokens < axes.get_xlim()[1]:
            axes.axvline(tokens, color=MUTED, lw=1.2, zorder=0)
            axes.annotate(
                name,
                xy=(tokens, 0),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 5),
                textcoords="offset pixels",
                rotation=90,
                ha="right",
                va="bottom",
                color=MUTED,
                fontsize=10.5,
            )


def _enlarge(axes: "Axes", lines: Sequence[Line]) -> None:
    """Fit the limits to the last part of the run; a diverged run does not flatten the others."""
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


def _label_ends(axes: "Axes", lines: Sequence[Line], *others: tuple[float, str, str]) -> None:
    """Label the ends of the lines. others: (y, name, colour) of further labels."""
    ends = [(float(line.value[-1]), line.name, placeholder(line.series)) for line in lines if len(line.value)]
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes belong to a figure"
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
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value, digits=6))
    axes.margins(x=0)
    axes.tick_params(axis="x", length=0)
