"""A plan as plain data for JSON: base units (bytes, seconds, FLOP), every figure predicted."""

from typing import Any

from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import Estimate, Plan, Prices
from fourbits.plan.failures import CHECKPOINT_BYTES
from fourbits.settings import to_dict


def plain_plan(plan: Plan, prices: Prices) -> dict[str, Any]:
    """Everything that the tables of `fourbits plan` show."""
    train = plan.config.train
    return {
        "figures": "predicted from "
        + (
            "declared rates"
            if plan.rates.source == "declared"
            else f"rates {plan.rates.source}, else declared ones"
        ),
        "gpu": to_dict(plan.gpu),
        "gpus": plan.gpus,
        "parameters": plan.parameters,
        "flops_per_token": plan.flops,
        "tokens": plan.tokens,
        "tokens_per_step": train.tokens_per_step,
        "steps": train.num_steps,
        "layout": to_dict(plan.estimate.choice.layout),
        "layout_runs_today": plan.cannot_run is None,
        "cannot_run": plan.cannot_run,
        "gpus_that_fit_without_tensor": plan.gpus_without_tensor,
        "memory": plan.estimate.choice.memory.parts,
        "memory_alternatives": [to_dict(each) for each in plan.alternatives],
        "step": plan.estimate.choice.step.parts,
        "recipes": [
            {"recipe": name, "fits": False} if each is None else plain_estimate(each, prices)
            for name, each in plan.compared.items()
        ],
        "amdahl": to_dict(plan.amdahl),
        "claims": [
            {"claim": each.claim.text, "of_peaks": each.of_peaks, "of_steps": each.of_steps}
            for each in plan.claims
        ],
        "checkpoints": _checkpoints(plan),
        "assumptions": assumptions(plan),
    }


def _checkpoints(plan: Plan) -> dict[str, Any]:
    failures, step, train = plan.failures, plan.estimate.step_seconds, plan.config.train
    best = failures.best_steps(step, train.num_steps)
    own = train.checkpoint_interval
    return {
        "bytes": CHECKPOINT_BYTES * plan.estimate.parameters,
        "seconds_between_failures": failures.between,
        "write_seconds": failures.checkpoint,
        "best_interval_steps": best,
        "best_interval_seconds": best * step,
        "lost_share": failures.lost(best * step),
        "own_interval_steps": own,
        "own_lost_share": None if own is None else failures.lost(min(own, train.num_steps) * step),
    }


def plain_estimate(each: Estimate, prices: Prices) -> dict[str, Any]:
    """The figures of one recipe."""
    return {
        "recipe": each.recipe,
        "fits": True,
        "runs_today": each.cannot_run is None,
        "quantized_gemms": each.units,
        "native": each.native,
        "layout": to_dict(each.choice.layout),
        "memory_bytes": each.choice.memory.total,
        "step_seconds": each.step_seconds,
        "tokens_per_second": each.tokens_per_second,
        "mfu": each.mfu,
        "seconds": each.seconds,
        "gpu_hours": each.gpu_hours,
        "megawatt_hours": each.megawatt_hours,
        "cost": each.cost(prices),
    }
