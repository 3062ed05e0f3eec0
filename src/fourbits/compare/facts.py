"""What a report says about how runs were made, and about what they cannot show."""

from collections.abc import Sequence

from fourbits.compare import words
from fourbits.compare.comparison import Comparison
from fourbits.compare.html import Node, join, tag
from fourbits.compare.runs import Run
from fourbits.compare.table import Row

# Nats, standard deviation over seeds of the final loss in published repetitions of 20B-parameter runs.
PUBLISHED_SEED_NOISE = 0.003


def run_facts(comparison: Comparison) -> dict[str, Node]:
    """Names and values for the list at the end of a report."""
    first = comparison.seeds[0]
    digests = [
        join(recipe, " ", tag("code", runs[first].manifest["recipe"]["digest"]), tag("br"))
        for recipe, runs in comparison.runs.items()
    ]
    return {
        **machine_facts(comparison.any_run),
        **training_facts(comparison.any_run),
        "side by side": side_by_side(comparison),
        "seeds": ", ".join(map(str, comparison.seeds)),
        "same for all recipes": "in every seed, by hash: initial weights, data order, validation samples",
        "recipes, by hash": join(*digests),
    }


def machine_facts(run: Run) -> dict[str, Node]:
    """Machine, versions and backend of one run."""
    manifest = run.manifest
    backend = manifest["backend"]
    return {
        "machine": f"{manifest['device']['name']}, {words.plural(manifest['threads'], 'thread')}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
        "backend": f"{backend['name']}: {backend['reason']}",
    }


def training_facts(run: Run) -> dict[str, Node]:
    """Model and length of one run."""
    model, counts = run.config["model"], run.manifest["model"]["parameters"]
    parts = f"{words.short_count(counts['linear'])} in the linears of blocks"
    return {
        "model": f"{num_parameters(run)} parameters, {parts}; width {model['d_model']}, {model['pattern']}",
        "training": f"{words.count(run.train['step'][-1])} steps, {words.count(run.tokens[-1])} tokens",
    }


def side_by_side(comparison: Comparison) -> str:
    """How many runs were made at a time, and on how many threads; all the answers if there are several."""
    found = {
        f"{words.plural(made.jobs, 'run')} at a time, {words.plural(made.threads, 'thread')} each"
        if made
        else "in parts"
        for made in comparison.made.values()
    }
    return "; ".join(sorted(found))


def num_parameters(run: Run) -> str:
    """Parameters of the model, in short."""
    return words.short_count(sum(run.manifest["model"]["parameters"].values()))


def blend_switches(run: Run) -> list[float]:
    """Training tokens at which the data change to a new phase."""
    plan = run.manifest["data"]["plan"]
    firsts = [phase["first_sample"] for phase in plan["phases"]]
    return [first * plan["seq_len"] for first in firsts if first > 0]


def caveats(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Sentences that keep a reader from reading more into the runs than is there."""
    notes = [_about_seeds(comparison, rows), _about_emulation(comparison), _about_size(comparison)]
    if any(row.speed_ratio is None for row in rows):
        notes.append(
            "Some runs were made in another session than their baseline, or hardly side by side with as many "
            "others: no speed ratio for them."
        )
    return notes


def _about_seeds(comparison: Comparison, rows: Sequence[Row]) -> str:
    if len(comparison.seeds) == 1:
        return (
            "One seed. How far two seeds of one recipe lie apart is not known from these runs; published "
            f"repetitions of large models spread by about {PUBLISHED_SEED_NOISE} nats, small ones by more. A "
            "difference smaller than that is not a finding. To learn the spread, repeat with --seeds 0 1 2."
        )
    unclear = [row.recipe for row in rows if row.within_noise and row.recipe != comparison.baseline]
    found = "Every gap is larger than two standard deviations of its seeds."
    if unclear:
        found = f"The gap of {words.listed(unclear)} is within two standard deviations: not a finding."
    return (
        f"{len(comparison.seeds)} seeds. {found} Differences between recipes that are smaller than their "
        "spreads are not findings either."
    )


def _about_emulation(comparison: Comparison) -> str:
    if comparison.any_run.manifest["backend"]["name"] == "native":
        return "The matrix products ran on FP4 tensor cores."
    return (
        "Codes and scales are those of 4-bit hardware, bit for bit; their products were computed exactly and "
        "summed in higher precision, by units that are not 4-bit. The losses are meant to carry over to such "
        "hardware. Speed and memory are not."
    )


def _about_size(comparison: Comparison) -> str:
    tokens = words.short_count(comparison.any_run.tokens[-1])
    return (
        f"{num_parameters(comparison.any_run)} parameters, {tokens} tokens. In published runs, the gap of "
        "4-bit training changes with size and with tokens per parameter, and what fails there (nvfp4-naive "
        "diverges at 1.2B parameters in arXiv:2509.25149) need not fail in a small run. Nothing here "
        "predicts a large one."
    )
