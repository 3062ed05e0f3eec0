"""Formats a plan as tables of text, which the terminal and the page share."""

from collections.abc import Iterator
from typing import NamedTuple

from fourbits.compare.number_format import count, long_duration, plural, short_count
from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import Alternative, Estimate, Plan, Prices
from fourbits.plan.failures import CHECKPOINT_BYTES, Failures
from fourbits.plan.gpus import Gpu
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.memory import USABLE
from fourbits.train.config import RunConfig

_GIB = 2**30
#: the least share of a step that the table of parts shows
_SHOWN = 0.002
#: parts of plan/memory.py -> their names in tables
MEMORY_NAMES = {
    "masters": "FP32 masters",
    "gradients": "gradients",
    "optimizer": "optimizer moments",
    "linear inputs": "saved inputs of linear layers",
    "other activations": "other saved activations",
    "kept weights": "quantized weights kept for Dgrad",
    "gathered": "weights gathered from shards",
    "logits": "logits, and the head's gradients",
}


class TextTable(NamedTuple):
    """A table of texts: the first column is a name."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def plan_tables(name: str, plan: Plan, prices: Prices) -> Iterator[TextTable]:
    """All tables of a plan."""
    own = plan.estimate
    yield model_table(name, plan)
    yield TextTable(
        "layout: the fastest that fits; predicted",
        ("setting", "value"),
        layout_rows(plan.config, own, plan.gpus_without_tensor),
    )
    yield TextTable(
        f"memory per GPU at the peak, of {plan.gpu.memory / _GIB:.0f} GiB; predicted",
        ("part", "GiB"),
        [
            (MEMORY_NAMES[part], _two_places(size / _GIB))
            for part, size in own.choice.memory.parts.items()
            if size
        ]
        + [("all", _two_places(own.choice.memory.total / _GIB))],
    )
    yield TextTable(
        "memory per GPU with other settings in this layout; predicted",
        ALTERNATIVES,
        alternative_rows(plan.alternatives, plan.gpu),
    )
    yield precision_table(plan, prices)
    yield step_table(own)
    yield gains_table(plan)
    yield TextTable(
        "checkpoints and failures; predicted",
        ("figure", "value"),
        checkpoint_rows(plan.config, own, plan.failures),
    )
    yield TextTable("assumptions", ("",), [(line,) for line in assumptions(plan)])


def model_table(name: str, plan: Plan) -> TextTable:
    """Parameters and FLOPs by type of layer."""
    train = plan.config.train
    title = f"{name}: {short_count(sum(plan.parameters.values()))} parameters, {short_count(plan.tokens)} "
    title += f"tokens in {plural(train.num_steps, 'step')} of {short_count(train.tokens_per_step)} tokens"
    flops = sum(plan.flops.values())
    named = {"embedding": "embedding", "head": "head", "norm": "norms", "conv": "conv", "scan": "scan"}
    counts = {named[kind]: n for kind, n in plan.parameters.items() if kind in named and n}
    counts |= {kind: round(value / 6) for kind, value in plan.flops.items() if kind.endswith("linears")}
    rows = [
        (
            kind,
            count(counts[kind]) if kind in counts else "",
            short_count(plan.flops[kind]) if kind in plan.flops else "",
            f"{plan.flops[kind] / flops:.1%}" if kind in plan.flops else "",
        )
        for kind in dict.fromkeys([*plan.flops, *counts])
    ]
    rows.append(("all", count(sum(plan.parameters.values())), short_count(flops), "100.0%"))
    return TextTable(title, ("part", "parameters", "FLOPs per token", "share"), rows)


def layout_rows(
    config: RunConfig, found: Estimate, without_tensor: int | None = None
) -> list[tuple[str, ...]]:
    """A layout as settings of `fourbits train`.

    without_tensor: the fewest GPUs that fit without tensor parallelism.
    """
    layout, samples = found.choice.layout, config.train.samples_per_step
    used = f"{layout.gpus:,} of {found.gpus:,}"
    if layout.gpus < found.gpus:
        used += f": no more of them share the {samples:,} sequences of a step equally"
    rows = [
        ("GPUs that compute", used),
        ("parallel.replicate x parallel.shard", f"{layout.replicate} x {layout.shard}"),
    ]
    if layout.tensor > 1:
        rows.append(("parallel.tensor", f"{layout.tensor}"))
    if domains := _domains(layout, found.gpu):
        rows.append(("link domains", domains))
    rows += [
        ("train.micro_batch_size", f"{layout.micro_batch}"),
        ("train.gradient_accumulation", f"{samples // layout.micro_batch}, counted over all ranks"),
        ("train.activation_checkpointing", layout.recompute),
    ]
    if layout.accumulate == "sharded" and layout.accumulation > 1:
        rows.append(("parallel.accumulate", "sharded, in another order of sums than unsharded"))
    if found.cannot_run is not None:
        rows.append(("not possible today", found.cannot_run))
        instead = "no number of GPUs fits without tensor parallelism"
        if without_tensor is not None:
            instead = f"{without_tensor:,} GPUs fit without tensor parallelism"
        rows.append(("instead", instead))
    return rows


def _domains(layout: ParallelLayout, gpu: Gpu) -> str:
    """How many link domains the shard groups need if they do not fill them; empty if they do."""
    group = layout.shard * layout.tensor
    if layout.gpus <= gpu.domain or group > gpu.domain or gpu.domain % group == 0:
        return ""
    each = gpu.domain // group
    needed, idle = -(-layout.replicate // each), gpu.domain - each * group
    groups = f"{each} shard group{'s' * (each > 1)} of {group}"
    return f"{needed:,} of {gpu.domain} GPUs: {groups} in each, {idle} GPUs left over"


ALTERNATIVES = ("recomputation", "saved inputs", "GiB", "fits")


def alternative_rows(found: tuple[Alternative, ...], gpu: Gpu) -> list[tuple[str, ...]]:
    """Memory with other recomputation and packing."""
    packings = {None: "in BF16", False: "in BF16", True: "packed"}
    return [
        (
            each.recompute,
            packings[each.packed],
            _two_places(each.bytes / _GIB),
            "yes" if each.bytes <= USABLE * gpu.memory else "no",
        )
        for each in found
    ]


def precision_table(plan: Plan, prices: Prices) -> TextTable:
    """Every compared recipe in its fastest layout."""
    priced = prices.gpu_hour is not None or prices.kwh is not None
    columns = (
        "recipe",
        "quantized GEMMs",
        "layout, recomputation",
        "step s",
        "tokens/s",
        "tokens/s per GPU",
        "MFU of BF16",
    )
    columns += ("vs bf16", "time", "MWh at most", *(("cost",) if priced else ()))
    base = plan.compared["bf16"]
    rows: list[tuple[str, ...]] = []
    for name, each in plan.compared.items():
        if each is None:
            rows.append((name, "does not fit", *[""] * (len(columns) - 2)))
            continue
        cost = each.cost(prices)
        refused = ", not possible today" if each.cannot_run else ""
        rows.append(
            (
                name,
                each.units,
                layout_text(each.choice.layout) + refused,
                f"{each.step_seconds:.3g}",
                count(each.tokens_per_second),
                count(each.per_gpu),
                f"{each.mfu:.1%}",
                "" if base is None else f"{each.tokens_per_second / base.tokens_per_second:.2f}x",
                long_duration(each.seconds),
                megawatt_hours(each.megawatt_hours),
                *((f"{cost:,.0f}",) if cost is not None else ()),
            )
        )
    title = f"precisions on {plan.gpus:,} {plan.gpu.name}, each in its fastest layout; predicted"
    return TextTable(title, columns, rows)


def layout_text(layout: ParallelLayout) -> str:
    """Copies x shards (x ranks of tensor parallelism), sequences of a micro-batch, recomputation."""
    ranks = f"{layout.replicate} x {layout.shard}" + (f" x {layout.tensor}" if layout.tensor > 1 else "")
    sharded = ", gradients added up in shards" * (layout.accumulate == "sharded" and layout.accumulation > 1)
    return f"{ranks}, micro-batch {layout.micro_batch}, {layout.recompute}{sharded}"


def megawatt_hours(value: float) -> str:
    """A number in three digits, or two if below 10."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _two_places(value: float) -> str:
    """A number with two decimal places, or if below 0.1 with two digits, so that little is not shown as 0."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def step_table(found: Estimate) -> TextTable:
    """The parts of a step, longest first."""
    step = found.choice.step
    parts = sorted(step.parts.items(), key=lambda item: -item[1])
    rows = [
        (part, _milliseconds(seconds), f"{seconds / step.seconds:.1%}")
        for part, seconds in parts
        if seconds / step.seconds >= _SHOWN
    ]
    title = f"a step in {found.recipe}, {step.seconds:.3g} s; predicted"
    return TextTable(title, ("part", "ms", "share"), rows)


def _milliseconds(seconds: float) -> str:
    """Milliseconds with one decimal place, or if below 1 with two digits."""
    return f"{1e3 * seconds:,.1f}" if seconds >= 1e-3 else f"{1e3 * seconds:.2g}"


def gains_table(plan: Plan) -> TextTable:
    """The possible gain of 4 bits: Amdahl's bounds, and public claims."""
    amdahl = plan.amdahl
    quantized = f"GEMMs that the recipe quantizes, {amdahl.share:.1%} of a BF16 step: infinitely fast"
    rows = [
        ("bound (Amdahl)", "", f"{amdahl.at_infinity:.2f}x", quantized),
        ("bound", "", f"{amdahl.at_peak_ratio:.2f}x", "the same GEMMs at the ratio of declared peaks"),
        ("prediction", "", f"{amdahl.predicted:.2f}x", f"on {plan.gpu.name}, quantizers included"),
    ]
    for each in plan.claims:
        steps = "does not fit" if each.of_steps is None else f"{each.of_steps:.2f}x"
        what = f"GEMM peaks alone ({each.claim.source})"
        rows.append((each.claim.text, f"{each.of_peaks:.1f}x", steps, what))
    columns = ("claim", "declared peaks", "a step of this run", "of what")
    return TextTable("what 4 bits can gain; predicted", columns, rows)


def checkpoint_rows(config: RunConfig, found: Estimate, failures: Failures) -> list[tuple[str, ...]]:
    """Size and cadence of checkpoints, and the time that they and failures cost."""
    step, steps, parameters = found.step_seconds, config.train.num_steps, found.parameters
    best = failures.best_steps(step, steps)
    interval = f"{long_duration(best * step)}, {best:,} steps"
    if best == steps:
        interval = f"the whole run ({long_duration(found.seconds)}): one at its end"
    rows = [
        ("size", f"{parameters * CHECKPOINT_BYTES / _GIB:,.3g} GiB"),
        ("training waits for one", f"{failures.checkpoint:.2g} s"),
        ("one failure every", long_duration(failures.between)),
        ("best interval", interval),
        ("lost at that interval", f"{failures.lost(best * step):.1%} of the time"),
    ]
    own = config.train.checkpoint_interval
    if own is not None and own < steps:
        rows.append(
            (f"lost at train.checkpoint_interval {own:,}", f"{failures.lost(own * step):.1%} of the time")
        )
    return rows
