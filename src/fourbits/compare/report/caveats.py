"""Sentences in a report that keep a reader from concluding more than the runs show."""

from collections.abc import Sequence

from fourbits.compare.number_format import listed, short_count
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.run_details import num_parameters, ran_native, repetition
from fourbits.compare.report.table import Row

# Nats, standard deviation over seeds of the final loss in published repetitions of 20B-parameter runs.
PUBLISHED_SEED_NOISE = 0.003


def caveats(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """What the number of seeds, the emulation, the size and the load allow to conclude."""
    sentences = [_about_seeds(comparison, rows), _about_emulation(comparison), _about_size(comparison)]
    if any(row.speed_ratio is None for row in rows):
        sentences.append(
            "No speed ratio for runs that did not execute under the same load as their baseline."
        )
    if text := repetition(comparison.any_run):
        sentences.append(f"{text} Losses on text that was read before say little about new text.")
    return sentences


def _about_seeds(comparison: Comparison, rows: Sequence[Row]) -> str:
    if len(comparison.seeds) == 1:
        return (
            "Only one seed, so seed-to-seed noise is unknown. Published repetitions of large models have a "
            f"standard deviation of about {PUBLISHED_SEED_NOISE} nats; small models vary more. A smaller "
            "difference is not a finding. Rerun with --seeds 0 1 2 to estimate the noise."
        )
    unclear = [row.recipe for row in rows if row.within_noise and row.recipe != comparison.baseline]
    found = "Every gap exceeds two standard deviations over seeds."
    if unclear:
        found = f"The gap of {listed(unclear)} is within two standard deviations over seeds: not a finding."
    return (
        f"{len(comparison.seeds)} seeds. {found} Differences between recipes below their standard deviations "
        "are not findings either."
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
