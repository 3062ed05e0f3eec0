"""Every assumption behind a plan, as sentences: what is not in the configuration and was not measured."""

from dataclasses import fields

from fourbits.plan.communication import LATENCY
from fourbits.plan.estimate import Plan
from fourbits.plan.failures import HOST_RATE, HOURS_BETWEEN_FAILURES, RESTART_SECONDS, STORAGE_RATE
from fourbits.plan.memory import USABLE
from fourbits.plan.rates import DECLARED


def assumptions(plan: Plan) -> list[str]:
    """In the order in which they matter."""
    rates, gpu, model = plan.rates, plan.gpu, plan.config.model
    measured = [f.name for f in fields(rates) if getattr(rates, f.name) != getattr(DECLARED, f.name)]
    where = f"; {', '.join(n for n in measured if n != 'origin')}: {rates.origin}" if measured else ""
    scheduled = bool(plan.config.recipe.schedule)
    saves = f"training waits for checkpoints, written at {STORAGE_RATE / 1e9:.0f} GB/s"
    if plan.config.train.background_saves:
        saves = f"training waits for a copy of checkpoints at {HOST_RATE / 1e9:.0f} GB/s per GPU"
    return [
        f"peaks, bandwidths, power of {gpu.name}: declared by {gpu.source}",
        f"shares of them: large GEMMs {rates.gemm_share('bf16'):.2f} in BF16 and "
        f"{rates.gemm_share('nvfp4'):.2f} in FP4, attention {rates.attention:.2f} and scan "
        f"{rates.scan:.2f} of the BF16 peak, memory {rates.copy:.2f}; elementwise work "
        f"{rates.elementwise:.2f}, quantizers {rates.quantize:.2f} (stochastic "
        f"{rates.quantize_stochastic:.2f}) of copying, links {rates.link:.2f}, network "
        f"{rates.network:.2f}{where}",
        f"vocabulary of {model.vocab_size:,}: of a prepared folder, or data.vocab_size and "
        "data.model_vocab_size",
        *(["the recipe's precision schedule is not planned: every step is that of its table"] * scheduled),
        "steps of the configuration, whole ones; no time for validation, health samples or loading data",
        f"{USABLE:.0%} of the memory usable; weights gathered block by block, as parallel.gather sends them",
        f"{1e6 * LATENCY:.0f} us per rank and ring; sums over copies wait, at {rates.copies:.2f} "
        "of the network, and so do weights and gradients of embedding and head; other traffic overlaps",
        "shard groups lie within one link domain, which a rack may not divide into",
        "days, energy and cost without failures and checkpoints, which the last table adds",
        f"launches take the host {1e3 * rates.host_quantized:.2f} ms per quantized layer, "
        f"{1e3 * rates.host_linear:.2f} per other one and {1e3 * rates.host_block:.2f} per block, "
        "which counts where GPUs take less",
        f"one GPU fails every {HOURS_BETWEEN_FAILURES:,.0f} h (arXiv:2407.21783), a restart takes "
        f"{RESTART_SECONDS / 60:.0f} min, {saves}",
        f"{gpu.system_watts:,.0f} W per GPU for the whole system, always; no cooling of the room",
    ]
