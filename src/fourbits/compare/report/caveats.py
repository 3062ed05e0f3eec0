"""Writes the sentences of a report that state what its runs do not show."""

from collections.abc import Sequence

from fourbits.compare.number_format import listed, plural, short_count
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.run_details import num_parameters, ran_native, repetition
from fourbits.compare.report.table import Row


def caveats(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """What the number of seeds, the emulation, the model's size and the load allow to conclude."""
    sentences = [_about_seeds(comparison, rows), _about_emulation(comparison), _about_size(comparison)]
    if comparison.fork_step is not None:
        sentences.append(forked_from(comparison))
    if comparison.stops:
        sentences.append(
            "Recipes have unequal numbers of seeds, because those that were decided stopped early. Their "
            "mean losses are over different seeds and do not compare; gaps do, as they are taken within a "
            "seed. The intervals of gaps are wider than usual, so that in 95 of 100 comparisons all of them "
            "hold after every seed, and stopping when they separate is no error."
        )
    if any(row.speed_ratio is None for row in rows):
        sentences.append(
            "No speed ratio for runs that did not execute under the same load as their baseline."
        )
    if text := repetition(comparison.any_run):
        sentences.append(f"{text} Losses on text that the model has read before say little about new text.")
    return sentences


def forked_from(comparison: Comparison) -> str:
    """What gaps of runs that continue the baseline's mean."""
    steps, step = int(comparison.any_run.train["step"][-1]), comparison.fork_step or 0
    return (
        f"Every recipe continues {comparison.baseline}'s run of its seed after {step:,} of {steps:,} steps, "
        f"so its gap is what the last {steps - step:,} steps cost in its precision. Gaps of whole runs are "
        "larger, and vary far more from seed to seed."
    )


def _about_seeds(comparison: Comparison, rows: Sequence[Row]) -> str:
    if len(comparison.seeds) == 1:
        return (
            "One seed, so the noise between seeds is unknown, and no difference between losses here "
            "is a finding. Rerun with --seeds 0 1 2 for intervals."
        )
    unclear = [row.recipe for row in rows if row.within_noise and row.recipe != comparison.baseline]
    found = "No interval of a gap includes zero."
    if unclear:
        subject, verb = ("interval", "includes") if len(unclear) == 1 else ("intervals", "include")
        names = f"The {subject} of {listed(unclear)} {verb} zero"
        found = f"{names}: no difference to {comparison.baseline} shown."
    return (
        f"{plural(len(comparison.seeds), 'seed')}. {found} An interval covers the expected gap in 95 of 100 "
        "comparisons, if gaps are normally distributed over seeds; of many intervals, some miss it."
    )


def _about_emulation(comparison: Comparison) -> str:
    if ran_native(comparison.any_run):
        return "The GEMMs ran on FP4 tensor cores."
    return (
        "Codes and scales are bit-identical to those of 4-bit hardware. Their products are exact, and "
        "accumulated in FP32 on non-FP4 units. Losses should transfer to FP4 hardware; speed and memory do "
        "not."
    )


def _about_size(comparison: Comparison) -> str:
    tokens = short_count(comparison.any_run.tokens[-1])
    return (
        f"{num_parameters(comparison.any_run)} parameters, {tokens} tokens. In published runs, the gap of "
        "4-bit training depends on model size and on tokens per parameter, and a recipe that fails there "
        "(nvfp4-naive diverges at 1.2B parameters in arXiv:2509.25149) may work in a small run. These "
        "results do not predict those of a large run."
    )
