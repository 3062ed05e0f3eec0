"""A plan as plain data for JSON: base units (bytes, seconds, FLOP), every figure predicted."""

from typing import Any

from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import Estimate, Plan, Prices
from fourbits.settings import to_dict


def plain_plan(plan: Plan, prices: Prices) -> dict[str, Any]:
    """Everything that the tables of `fourbits plan` show."""
    failures, train = plan.failures, plan.config.train
    return {
        "figures": f"predicted from {plan.rates.origin} rates",
        "gpu": to_dict(plan.gpu),
        "gpus": plan.gpus,
        "parameters": plan.parameters,
        "flops_per_token": plan.flops,
        "tokens": plan.tokens,
        "tokens_per_step": train.tokens_per_step,
        "steps": train.num_steps,
        "layout": to_dict(plan.estimate.choice.layout),
        "layout_runs_today": plan.cannot_run is None,
        "memory": plan.estimate.choice.memory.parts,
        "step": plan.estimate.choice.step.parts,
        "recipes": [plain_estimate(each, prices) for each in recipes_of(plan)],
        "amdahl": to_dict(plan.amdahl),
        "claims": [
            {"claim": each.claim.text, "of_peaks": each.of_peaks, "of_steps": each.of_steps}
            for each in plan.claims
        ],
        "checkpoints": {
            "seconds_between_failures": failures.between,
            "write_seconds": failures.checkpoint,
            "best_interval_seconds": failures.best_interval,
            "lost_share": failures.lost(failures.best_interval),
        },
        "assumptions": assumptions(plan),
    }


def recipes_of(plan: Plan) -> list[Estimate]:
    """The compared recipes, and the run's own where it is another."""
    names = [each.recipe for each in plan.compared]
    return [*plan.compared, *([] if plan.estimate.recipe in names else [plan.estimate])]


def plain_estimate(each: Estimate, prices: Prices) -> dict[str, Any]:
    """One recipe."""
    return {
        "recipe": each.recipe,
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
