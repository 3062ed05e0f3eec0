"""The section "Run details" of a report: machine, versions, model, training, and how runs executed."""

from fourbits.compare.number_format import count, listed, plural, short_count
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.figures import Switch
from fourbits.compare.report.runs import Run


def comparison_details(comparison: Comparison) -> dict[str, str]:
    """Names and values for a comparison."""
    return {
        **run_details(comparison.any_run),
        "parallelism": parallelism(comparison),
        "seeds": ", ".join(map(str, comparison.seeds)),
        "shared by all recipes": "per seed, checked by hash: initial weights, data order, validation samples",
        **_all_rolled_back(comparison),
    }


def _all_rolled_back(comparison: Comparison) -> dict[str, str]:
    """The runs that rolled back, and so read other data than the other runs afterwards."""
    parts = [
        f"{recipe}, seed {seed}: {rolled_back(run)}"
        for recipe, runs in comparison.runs.items()
        for seed, run in runs.items()
        if run.rollbacks
    ]
    return {"other data after rollbacks": " ".join(parts)} if parts else {}


def run_details(run: Run) -> dict[str, str]:
    """Names and values for one run."""
    manifest, model = run.manifest, run.config["model"]
    backend, linear = manifest["backend"], short_count(manifest["model"]["parameters"]["linear"])
    return {
        "machine": f"{manifest['device']['name']}, {plural(manifest['threads'], 'thread')}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
        "backend": f"{backend['name']}: {backend['reason']}",
        "model": (
            f"{num_parameters(run)} parameters, {linear} of them in the blocks' linear layers; "
            f"width {model['d_model']}, pattern {model['pattern']}"
        ),
        "training": f"{plural(int(run.train['step'][-1]), 'step')}, {count(run.tokens[-1])} tokens",
    }


def parallelism(comparison: Comparison) -> str:
    """The number of parallel runs, and threads of each; every combination that occurred."""
    found = {
        f"{plural(each.jobs, 'run')} {'in parallel' if each.jobs > 1 else 'at a time'}, "
        f"{plural(each.threads, 'thread')} each"
        if each
        else "resumed across sessions"
        for each in comparison.provenance.values()
    }
    return "; ".join(sorted(found))


def num_parameters(run: Run) -> str:
    """Number of parameters of the model, as a short count."""
    return short_count(sum(run.manifest["model"]["parameters"].values()))


def phase_starts(run: Run) -> list[float]:
    """Training tokens at which a new phase of the data begins."""
    stream = run.manifest["data"]["plan"]
    firsts = [phase["first_sample"] for phase in stream["phases"]]
    return [first * stream["seq_len"] for first in firsts if first > 0]


def switches(run: Run) -> list[Switch]:
    """Training tokens at which the precision changes by the recipe's schedule, with the phase's name."""
    found: list[Switch] = []
    last = float(run.train["step"][-1])
    for phase in run.manifest.get("schedule", []):
        end = phase["last_step"]
        points = [(phase["first_step"] - 1, phase["name"])]
        points += [] if end is None else [(end, f"{phase['name']} ends")]
        found += [(float(run.tokens_at(step)), name) for step, name in points if 0 < step < last]
    return sorted(found)


def repetition(run: Run) -> str:
    """A sentence about the sources that all steps together read more than once; "" if there are none."""
    sources = run.manifest["data"]["plan"]["sources"]
    parts = [f"{name} {each['epochs']:.1f} times" for name, each in sources.items() if each["epochs"] > 1]
    return f"Training text repeats: all steps together read {listed(parts)}." if parts else ""


def rolled_back(run: Run) -> str:
    """A sentence about the run's rollbacks; "" if there are none."""
    parts = [f"step {each['step']} to {each['to']} ({each['reason']})" for each in run.rollbacks]
    times = {1: "once", 2: "twice"}.get(len(parts), f"{len(parts)} times")
    return f"Rolled back {times}: {listed(parts)}." if parts else ""


def ran_native(run: Run) -> bool:
    """Whether GEMMs ran on FP4 tensor cores."""
    return run.manifest["backend"]["name"] == "native"
