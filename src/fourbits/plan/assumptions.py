"""Every assumption behind a plan, as sentences: what is not in the configuration and was not measured."""

from fourbits.plan.communication import LATENCY
from fourbits.plan.estimate import Plan
from fourbits.plan.failures import HOST_RATE, HOURS_BETWEEN_FAILURES, RESTART_SECONDS, STORAGE_RATE
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.memory import USABLE
from fourbits.plan.rates import DECLARED, RAMP, SPLIT, TILE, Rates
from fourbits.train.parallel import ParallelConfig


def assumptions(plan: Plan) -> list[str]:
    """The assumptions behind a plan, the most important first."""
    rates, gpu, config = plan.rates, plan.gpu, plan.config
    layout = plan.estimate.choice.layout
    group = layout.shard * layout.tensor
    place = f"every shard group lies within one of the link domains of {gpu.domain} GPUs"
    if group > gpu.domain:
        place = f"shard groups of {group} GPUs span link domains of {gpu.domain}, at the network's rate"
    saves = f"training waits while a checkpoint is written, at {STORAGE_RATE / 1e9:.0f} GB/s in all"
    if config.train.background_saves:
        saves = (
            f"training waits while a checkpoint is copied to the host, at {HOST_RATE / 1e9:.0f} GB/s per GPU"
        )
    return [
        f"peaks, bandwidths and power of {gpu.name} are declared: {gpu.source}",
        *_efficiencies(rates),
        _shapes(rates),
        f"a vocabulary of {config.model.vocab_size:,} tokens: the prepared folder's, or that of "
        "data.model_vocab_size and data.vocab_size",
        *_of_the_recipe(plan),
        "whole steps; no time for validation, health samples or waiting for data",
        *_ignored_mesh(plan),
        f"{USABLE:.0%} of the memory is usable; blocks are gathered in groups of at least "
        f"{layout.gather_weights:,} weights",
        f"a collective takes {1e6 * LATENCY:.0f} us more per rank; sums over replicas, and the weights and "
        "gradients of embedding and head, are never hidden; other traffic is, by computation that takes as "
        "long",
        *([place] * (group > 1)),
        "time, energy and cost do not include failures and checkpoints; the table about them has their share",
        *_host(rates, layout),
        f"one GPU fails every {HOURS_BETWEEN_FAILURES:,.0f} h (arXiv:2407.21783); a restart takes "
        f"{RESTART_SECONDS / 60:.0f} min; {saves}",
        f"{gpu.system_watts:,.0f} W per GPU for the whole system, all the time, without cooling of the room",
    ]


def _of_the_recipe(plan: Plan) -> list[str]:
    """What a plan leaves out of a recipe."""
    recipe = plan.config.recipe
    schedule = "every step has the precisions of the recipe's table: its schedule is not planned"
    feedback = (
        "error feedback is planned like a quantizer without it: over all of K it took 3 (K = 640) to 11 "
        "times (4,096) as long on an H200 (docs/log.md)"
    )
    return [schedule] * bool(recipe.schedule) + [feedback] * bool(recipe.fprop.lhs.error_feedback)


def _shapes(rates: Rates) -> str:
    """How a GEMM's shape changes its rate, and what separates two kernels."""
    return (
        "a large GEMM has full tiles and long sums; another has of its rate the filled share of its tiles of "
        f"{TILE[0]} x {TILE[1]} and of their last wave over the SMs ({SPLIT:.2f} if the tiles are fewer than "
        f"SMs), times k / (k + {RAMP}) for sums of length k; {1e6 * rates.launch:.1f} us between two kernels"
    )


def _host(rates: Rates, layout: ParallelLayout) -> list[str]:
    """The time of the host in a step, and the part of it that is not planned."""
    taken = (
        f"the host takes {1e3 * rates.host_quantized:.2f} ms to launch a quantized layer, "
        f"{1e3 * rates.host_linear:.2f} ms another linear layer, {1e3 * rates.host_block:.2f} ms the rest of "
        f"a block, and {1e3 * rates.host_message:.1f} ms a gather of blocks or a sum of their gradients over "
        "ranks, which counts where GPUs take less"
    )
    missing = (
        "no time of the host for the messages of tensor parallelism: in steps of two H200s they took most of "
        "the time (docs/plan.md)"
    )
    return [taken, *([missing] * (layout.tensor > 1))]


def _ignored_mesh(plan: Plan) -> list[str]:
    """A sentence, if the configuration asks for another mesh than the plan's."""
    own, found = plan.config.parallel, plan.estimate.choice.layout
    asked = {"replicate": own.replicate, "shard": own.shard, "tensor": own.tensor}
    other = [
        f"parallel.{name} {value}"
        for name, value in asked.items()
        if value not in (None, getattr(ParallelConfig(), name), getattr(found, name))
    ]
    return [
        f"the search has chosen the mesh, whatever the configuration asks for: {', '.join(other)}"
    ] * bool(other)


def _efficiencies(rates: Rates) -> list[str]:
    """A sentence with the declared efficiencies, and one with the measured ones, if any were."""
    of_gemms = dict(rates.gemm_of)
    formats = {"bf16": "BF16", "emulated": "BF16 of 4-bit operands", "fp8": "FP8", "nvfp4": "FP4"}
    found = [
        (unit in of_gemms, f"large GEMMs in {name} {rates.gemm_share(unit):.2f} of the peak")
        for unit, name in formats.items()
        if unit in of_gemms or unit != "emulated"
    ]
    for name, text in (
        ("attention", "attention {:.2f} of the BF16 peak"),
        ("scan", "SSD scan {:.2f} of the BF16 peak"),
        ("copy", "copying {:.2f} of the memory bandwidth"),
        ("elementwise", "elementwise work {:.2f} of copying"),
        ("quantize", "quantizers {:.2f} of copying"),
        ("quantize_stochastic", "quantizers with stochastic rounding {:.2f} of copying"),
        ("link", "collectives {:.2f} of the links"),
        ("network", "collectives {:.2f} of the network"),
        ("replicas", "sums over replicas {:.2f} of the network"),
    ):
        value = getattr(rates, name)
        found.append((value != getattr(DECLARED, name), text.format(value)))
    measured = [text for was_measured, text in found if was_measured]
    declared = [text for was_measured, text in found if not was_measured]
    lines = [f"efficiencies, declared: {'; '.join(declared)}"]
    return [f"efficiencies, {rates.source}: {'; '.join(measured)}", *lines] if measured else lines
