"""The final table: one row per recipe, computed from the runs alone."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.divergence import Stability, judge
from fourbits.compare.report.runs import Run
from fourbits.compare.statistics.interval import margin, standard_deviation
from fourbits.settings import to_dict


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe. The fields are the keys in table.json.

    Losses are in nats per token; *_spread is the standard deviation over seeds, and *_margin half the width
    of the 95 % interval around the mean (Student's t), both None for one seed; the margin of a gap allows for
    the looks of a comparison that stops early. Gaps to the baseline are
    computed per seed, then averaged. Losses and gaps are None if a run did not reach its last step.
    speed_ratio: to the baseline, None unless both executed under the same load. verdict: the worst
    over seeds.
    """

    recipe: str
    digest: str
    seeds: int
    val_loss: float | None
    val_loss_spread: float | None
    val_loss_margin: float | None
    gap_nats: float | None
    gap_nats_spread: float | None
    gap_nats_margin: float | None
    gap_percent: float | None
    gap_percent_margin: float | None
    train_loss: float | None
    tokens_per_second: float
    speed_ratio: float | None
    peak_memory_bytes: int
    verdict: str
    verdict_reason: str

    @property
    def within_noise(self) -> bool | None:
        """Whether the 95 % interval of the gap includes zero; None for one seed."""
        if self.gap_nats is None or self.gap_nats_margin is None:
            return None
        return abs(self.gap_nats) <= self.gap_nats_margin


def final_table(comparison: Comparison) -> list[Row]:
    """A row per recipe, in report order."""
    return [_row(comparison, recipe) for recipe in comparison.recipes]


def table_record(comparison: Comparison, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of table.json: what was compared, the rows, and the gap over training."""
    gaps = {
        recipe: comparison.gap_line(recipe) for recipe in comparison.recipes if recipe != comparison.baseline
    }
    return {
        "name": comparison.name,
        "baseline": comparison.baseline,
        "seeds": comparison.seeds,
        "tokens_per_run": int(comparison.any_run.tokens[-1]),
        "steps": int(comparison.any_run.train["step"][-1]),
        "rows": [to_dict(row) for row in rows],
        "gap_percent_over_training": {
            recipe: [
                {"tokens": int(tokens), "gap_percent": float(gap)}
                for tokens, gap in zip(line.tokens, line.value, strict=True)
            ]
            for recipe, line in gaps.items()
        },
    }


def _row(comparison: Comparison, recipe: str) -> Row:
    runs, base = comparison.runs[recipe], comparison.runs[comparison.baseline]
    finished = {seed: run for seed, run in runs.items() if run.finished and base[seed].finished}
    complete = len(finished) == len(runs)
    losses = [run.final_loss for run in finished.values()] if complete else []
    gaps = [run.final_loss - base[seed].final_loss for seed, run in finished.items()] if complete else []
    percents = [100 * gap / base[seed].final_loss for seed, gap in zip(finished, gaps, strict=False)]
    worst, confidence = _worst(comparison, recipe), comparison.confidence(recipe)
    return Row(
        recipe=recipe,
        digest=next(iter(runs.values())).manifest["recipe"]["digest"],
        seeds=len(runs),
        val_loss=_mean(losses),
        val_loss_spread=standard_deviation(losses),
        val_loss_margin=margin(losses),
        gap_nats=_mean(gaps),
        gap_nats_spread=standard_deviation(gaps),
        gap_nats_margin=margin(gaps, confidence),
        gap_percent=_mean(percents),
        gap_percent_margin=margin(percents, confidence),
        train_loss=_mean([run.summary["train_loss"] for run in finished.values()]) if complete else None,
        tokens_per_second=statistics.fmean(comparison.speed(recipe, seed) for seed in runs),
        speed_ratio=_speed_ratio(comparison, recipe),
        peak_memory_bytes=max(int(run.summary["peak_memory_bytes"]) for run in runs.values()),
        verdict=worst.verdict,
        verdict_reason=worst.reason,
    )


def _speed_ratio(comparison: Comparison, recipe: str) -> float | None:
    """Mean over the seeds whose run and baseline executed under the same load."""
    base = comparison.baseline
    ratios = [
        comparison.speed(recipe, seed) / comparison.speed(base, seed)
        for seed in comparison.runs[recipe]
        if (own := comparison.provenance[recipe, seed]) and own.comparable(comparison.provenance[base, seed])
    ]
    return statistics.fmean(ratios) if ratios else None


def _worst(comparison: Comparison, recipe: str) -> Stability:
    order = {"stable": 0, "spike": 1, "diverged": 2}
    is_baseline = recipe == comparison.baseline
    findings = [
        judge_run(run, None if is_baseline else comparison.runs[comparison.baseline][seed])
        for seed, run in comparison.runs[recipe].items()
    ]
    return max(findings, key=lambda finding: order[finding.verdict])


def judge_run(run: Run, baseline: Run | None = None) -> Stability:
    """Judge a run by how it ended and by its training loss. baseline: the baseline's run of the same seed."""
    if run.summary.get("ended") == "non-finite":
        return Stability("diverged", int(run.train["step"][-1]), run.summary["reason"])
    length = min(len(run.tokens), len(baseline.tokens)) if baseline else len(run.tokens)
    level = baseline.train["loss"][:length] if baseline else None
    return judge(run.train["step"][:length], run.train["loss"][:length], level)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
