"""Tokens and time until a recipe reaches a loss that the baseline had.

The loss between two validations is interpolated linearly over tokens. Time is that of training steps at the
run's median speed, without compilation, validation and checkpoints.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourbits.compare.number_format import DASH, NO_BREAK, duration, ratio, short_count
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.runs import Run
from fourbits.compare.report.side_table import SideTable

#: shares of the baseline's tokens whose loss is the target
SHARES = (0.9, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When a recipe reaches the loss that the baseline with the same seed had after a share of its tokens.

    target: that loss, mean over seeds. tokens, seconds: means over seeds, None if a seed never gets there;
    tokens_ratio: relative to the baseline's; more_than: a lower bound of tokens_ratio if that is None.
    """

    recipe: str
    share: float
    target: float
    tokens: float | None
    seconds: float | None
    tokens_ratio: float | None
    more_than: float | None


def reached(comparison: Comparison) -> list[Reached]:
    """A row for each recipe and share; none if the baseline was not validated before that share."""
    return [
        row
        for share in SHARES
        for recipe in comparison.recipes
        if (row := _reached(comparison, recipe, share)) is not None
    ]


def tokens_to_loss(run: Run, target: float) -> float | None:
    """Training tokens after which the validation loss is first at or below `target`; None for never."""
    tokens, losses = run.tokens_at(run.validation_steps), run.validation_loss(run.validation_steps)
    below = np.flatnonzero(losses <= target)
    if not below.size:
        return None
    at = int(below[0])
    if at == 0:
        return float(tokens[0])
    share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    return float(tokens[at - 1] + share * (tokens[at] - tokens[at - 1]))


def loss_after(run: Run, share: float) -> float | None:
    """Validation loss after a share of the run's tokens; None before its first validation."""
    tokens, losses = run.tokens_at(run.validation_steps), run.validation_loss(run.validation_steps)
    wanted = share * run.tokens[-1]
    if not len(tokens) or wanted < tokens[0]:
        return None
    return float(np.interp(wanted, tokens, losses))


def _reached(comparison: Comparison, recipe: str, share: float) -> Reached | None:
    base = comparison.runs[comparison.baseline]
    targets = {
        seed: loss_after(base[seed], share) if base[seed].finished else None
        for seed in comparison.runs[recipe]
    }
    known = {seed: target for seed, target in targets.items() if target is not None}
    if not known:
        return None
    own = {seed: tokens_to_loss(comparison.runs[recipe][seed], target) for seed, target in known.items()}
    of_base = statistics.fmean(tokens_to_loss(base[seed], target) or 0.0 for seed, target in known.items())
    tokens = _mean(list(own.values()))
    spent = statistics.fmean(float(comparison.runs[recipe][seed].tokens[-1]) for seed in known)
    return Reached(
        recipe=recipe,
        share=share,
        target=statistics.fmean(known.values()),
        tokens=tokens,
        seconds=_mean([each and each / comparison.speed(recipe, seed) for seed, each in own.items()]),
        tokens_ratio=tokens / of_base if tokens is not None else None,
        more_than=spent / of_base if tokens is None else None,
    )


def reached_table(comparison: Comparison, rows: Sequence[Reached]) -> SideTable | None:
    """The rows as text; None if only the baseline has rows."""
    shown = [recipe for recipe in comparison.recipes if any(row.recipe == recipe for row in rows)]
    if len(shown) < 2:
        return None
    by_key = {(row.recipe, row.share): row for row in rows}
    base = comparison.baseline
    columns = [
        name for share in SHARES for name in (f"tokens, {share:.0%}".replace("%", " %"), f"vs {base}", "time")
    ]
    return SideTable(
        title=f"Tokens and time to the loss that {base} had after 90 and 100 % of its tokens",
        columns=("recipe", *columns),
        rows=tuple(
            (recipe, *(cell for share in SHARES for cell in _cells(by_key.get((recipe, share)))))
            for recipe in shown
        ),
        note=f"vs {base}: tokens relative to those of {base}; not reached: by at least one seed, "
        "after more than all tokens of the run; time of training steps at their median speed",
    )


def _cells(row: Reached | None) -> tuple[str, str, str]:
    if row is None:
        return (DASH, DASH, DASH)
    if row.tokens is None or row.seconds is None:
        return ("not reached", f">{NO_BREAK}{row.more_than:.2f}x", DASH)
    return (short_count(row.tokens), ratio(row.tokens_ratio), duration(row.seconds))


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if any value is None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
