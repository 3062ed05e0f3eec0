"""The tables of `fourbits plan`."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from fourbits.compare.number_format import count, long_duration, short_count
from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import Estimate, Plan, Prices
from fourbits.plan.layouts import Layout
from fourbits.plan.plain import recipes_of
from fourbits.plan.published import Prediction
from fourbits.plan.road import Stage
from fourbits.plan.simulate import SEEDS, Cluster, sensitivity

_GIB = 2**30
#: the least share of a step that the table of parts shows
_SHOWN = 0.002


def plan_tables(name: str, plan: Plan, prices: Prices) -> Iterator[Table]:
    """All tables of a plan."""
    yield _model(name, plan)
    yield _layout(plan)
    yield _memory(plan)
    yield _recipes(plan, prices)
    yield _step(plan)
    yield _bounds(plan)
    yield _checkpoints(plan)
    yield _assumptions(plan)


def published_table(found: Sequence[Prediction]) -> Table:
    """Predicted beside measured."""
    table = _table(
        "predicted beside measured, tokens/s of one GPU and GiB",
        *("model", "recipe", "GPU", "predicted", "measured", "deviation", "GiB", "measured", "deviation"),
        "why",
    )
    for each in found:
        case, memory = each.case, each.memory_deviation
        packed = ", packed" if case.recipe.saved_inputs == "packed" else ""
        table.add_row(
            f"{case.name}, {case.layout.micro_batch} x {case.seq_len}",
            case.recipe.name + packed,
            case.gpu,
            count(each.tokens_per_second),
            count(case.tokens_per_second),
            f"{each.speed_deviation:+.0%}",
            "" if case.gib is None else f"{each.gib:.1f}",
            "" if case.gib is None else f"{case.gib:.1f}",
            "" if memory is None else f"{memory:+.1%}",
            case.why,
        )
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def _model(name: str, plan: Plan) -> Table:
    total = sum(plan.parameters.values())
    title = f"{name}: {short_count(total)} parameters, {short_count(plan.tokens)} tokens in "
    train = plan.config.train
    title += f"{count(train.num_steps)} steps of {short_count(train.tokens_per_step)}"
    table = _table(title, "part", "parameters", "FLOPs per token", "share")
    flops = sum(plan.flops.values())
    named = {"embedding": "embedding", "head": "head", "norm": "norms", "conv": "conv", "scan": "scan"}
    counts = {named[kind]: n for kind, n in plan.parameters.items() if kind in named and n}
    counts |= {kind: round(value / 6) for kind, value in plan.flops.items() if kind.endswith("linears")}
    for kind in dict.fromkeys([*plan.flops, *counts]):
        value = plan.flops.get(kind)
        table.add_row(
            kind,
            count(counts[kind]) if kind in counts else "",
            "" if value is None else short_count(value),
            "" if value is None else f"{value / flops:.1%}",
        )
    table.add_row("all", count(total), short_count(flops), "100.0%")
    return table


def _layout(plan: Plan) -> Table:
    layout = plan.estimate.choice.layout
    table = _table("layout: the fastest that fits", "setting", "value")
    samples = plan.config.train.samples_per_step
    used = f"{layout.gpus:,} of {plan.gpus:,}"
    if layout.gpus < plan.gpus:
        used += f": a step has {samples:,} sequences, which more ranks do not share equally"
    for setting, value in (
        ("GPUs that compute", used),
        ("parallel.replicate x shard", f"{layout.replicate} x {layout.shard}"),
        *((("tensor parallelism", f"{layout.tensor}"),) if layout.tensor > 1 else ()),
        ("train.micro_batch_size", f"{layout.micro_batch}"),
        ("train.gradient_accumulation", f"{samples // layout.micro_batch} on all ranks together"),
        ("train.activation_checkpointing", layout.recompute),
    ):
        table.add_row(setting, value)
    if plan.cannot_run is not None:
        table.add_row("not today", plan.cannot_run)
    return table


def _memory(plan: Plan) -> Table:
    memory = plan.estimate.choice.memory
    title = f"memory per GPU at the peak, of {plan.gpu.memory / _GIB:.0f} GiB"
    table = _table(title, "part", "GiB")
    for part, size in memory.parts.items():
        if size:
            table.add_row(part, f"{size / _GIB:.2f}")
    table.add_row("all", f"{memory.total / _GIB:.2f}")
    for name, total in plan.alternatives.items():
        table.add_row(name, f"{total / _GIB:.2f}")
    return table


def _recipes(plan: Plan, prices: Prices) -> Table:
    priced = prices.gpu_hour is not None or prices.kwh is not None
    title = f"precisions on {plan.gpus:,} {plan.gpu.name}, each in its fastest layout; predicted"
    columns = ("recipe", "low-precision GEMMs", "layout, recomputation", "step s", "tokens/s", "per GPU")
    more = ("MFU of BF16", "vs bf16", "time", "MWh at most")
    table = _table(title, *columns, *more, *(("cost",) if priced else ()))
    base = plan.compared[0].tokens_per_second
    for each in recipes_of(plan):
        cost = each.cost(prices)
        layout = each.choice.layout
        table.add_row(
            each.recipe,
            _units(each),
            _layout_text(layout),
            f"{each.step_seconds:.3g}",
            count(each.tokens_per_second),
            count(each.per_gpu),
            f"{each.mfu:.1%}",
            f"{each.tokens_per_second / base:.2f}x",
            long_duration(each.seconds),
            _megawatt_hours(each.megawatt_hours),
            *((f"{cost:,.0f}",) if cost is not None else ()),
        )
    return table


def _layout_text(layout: Layout) -> str:
    """Copies x shards (x ranks of tensor parallelism), sequences of a micro-batch, recomputation."""
    ranks = f"{layout.replicate} x {layout.shard}" + (f" x {layout.tensor}" if layout.tensor > 1 else "")
    return f"{ranks}, micro-batch {layout.micro_batch}, {layout.recompute}"


def _megawatt_hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _units(each: Estimate) -> str:
    if each.recipe == "bf16":
        return ""
    if not each.native:
        return "emulated in BF16"
    if each.recipe.startswith("fp8"):
        return "tensor cores"
    if each.recipe.startswith("mx"):
        return "tensor cores, which fourbits does not use"
    return "tensor cores, not yet run by fourbits"


def _step(plan: Plan) -> Table:
    step = plan.estimate.choice.step
    title = f"a step in {plan.estimate.recipe}, {step.seconds:.3g} s"
    table = _table(title, "part", "ms", "share")
    for part, seconds in sorted(step.parts.items(), key=lambda item: -item[1]):
        if seconds / step.seconds >= _SHOWN:
            table.add_row(part, f"{seconds * 1e3:,.1f}", f"{seconds / step.seconds:.1%}")
    return table


def _bounds(plan: Plan) -> Table:
    amdahl = plan.amdahl
    table = _table("what 4 bits can gain", "claim", "of what", "of peaks", "of a step of this run")
    quantized = f"GEMMs that the recipe quantizes: {amdahl.share:.1%} of a BF16 step"
    table.add_row("bound (Amdahl)", f"{quantized}, infinitely fast", "", f"{amdahl.at_infinity:.2f}x")
    table.add_row("", "the same, at the ratio of peaks", "", f"{amdahl.at_peak_ratio:.2f}x")
    table.add_row("", f"predicted on {plan.gpu.name}, quantizers included", "", f"{amdahl.predicted:.2f}x")
    for each in plan.claims:
        steps = "does not fit" if each.of_steps is None else f"{each.of_steps:.2f}x"
        what = f"GEMM peaks alone ({each.claim.source})"
        table.add_row(each.claim.text, what, f"{each.of_peaks:.1f}x", steps)
    return table


def _checkpoints(plan: Plan) -> Table:
    failures, step = plan.failures, plan.estimate.step_seconds
    best = failures.best_interval
    table = _table("checkpoints and failures", "figure", "value")
    rows = [
        ("size", f"{sum(plan.parameters.values()) * 12 / _GIB:,.0f} GiB"),
        ("training waits for one", f"{failures.checkpoint:.2g} s"),
        ("one failure every", long_duration(failures.between)),
        ("best interval", f"{long_duration(best)}, {max(1, round(best / step)):,} steps"),
        ("lost at that interval", f"{failures.lost(best):.1%} of the time"),
    ]
    if (steps := plan.config.train.checkpoint_interval) is not None:
        lost = failures.lost(steps * step)
        rows.append((f"lost at checkpoint_interval {steps:,}", f"{lost:.1%} of the time"))
    for row in rows:
        table.add_row(*row)
    return table


def simulation(plan: Plan) -> Table:
    """The run simulated, as assumed and with each assumption changed."""
    step = plan.estimate.step_seconds
    cluster = Cluster(
        step=step,
        steps=plan.config.train.num_steps,
        interval=max(1, round(plan.failures.best_interval / step)),
        gpus=plan.estimate.choice.layout.gpus,
        failures=plan.failures,
    )
    found = sensitivity(cluster)
    title = f"simulated, means of {SEEDS} seeds: without disturbance {long_duration(cluster.steps * step)}"
    table = _table(title, "assumption", "time", "change")
    for each in found:
        table.add_row(each.what, long_duration(each.seconds), f"{each.change:+.1%}")
    return table


def _assumptions(plan: Plan) -> Table:
    table = _table("assumptions", "")
    for line in assumptions(plan):
        table.add_row(line)
    return table


def road_table(stages: Sequence[Stage]) -> Table:
    """The stages of the road to 12B, planned."""
    columns = (
        "stage",
        "parameters",
        "tokens",
        "steps",
        "GPUs",
        "layout",
        "GiB",
        "step s",
        "tokens/s",
        "time",
    )
    table = _table("the road to 12B in nvfp4: predicted", *columns, "MWh", "checkpoint every")
    for stage in stages:
        table.add_row(*road_row(stage))
    return table


def road_row(stage: Stage) -> tuple[str, ...]:
    """One stage, in the columns of the table."""
    plan = stage.plan()
    own, layout = plan.estimate, plan.estimate.choice.layout
    interval = max(1, round(plan.failures.best_interval / own.step_seconds))
    return (
        stage.preset,
        short_count(sum(plan.parameters.values())),
        short_count(plan.tokens),
        count(plan.config.train.num_steps),
        f"{stage.gpus} {stage.gpu}",
        _layout_text(layout),
        f"{own.choice.memory.total / _GIB:.0f}",
        f"{own.step_seconds:.2f}",
        count(own.tokens_per_second),
        long_duration(own.seconds),
        _megawatt_hours(own.megawatt_hours),
        f"{count(min(interval, plan.config.train.num_steps))} steps",
    )
