"""The page of a plan: a grid of plans computed in advance, and controls that choose among them."""

from dataclasses import asdict

from fourbits.compare.number_format import count, short_count
from fourbits.compare.report.colours import palette, variables
from fourbits.compare.report.page import render_page
from fourbits.model.counts import count_parameters
from fourbits.plan.estimate import Prices
from fourbits.plan.gpus import Gpu
from fourbits.plan.grid import Grid
from fourbits.train.config import RunConfig


def plan_page(name: str, config: RunConfig, gpu: Gpu, grid: Grid, prices: Prices) -> str:
    """The HTML of a plan. config: with its model's vocabulary; prices: with which the page starts."""
    train = config.train
    return render_page(
        "plan.html",
        title=f"{name} on {gpu.name}",
        palette=palette(grid.recipes),
        name=name,
        gpu=gpu.name,
        source=gpu.source,
        parameters=short_count(sum(count_parameters(config.model).values())),
        tokens=short_count(train.num_steps * train.tokens_per_step),
        steps=count(train.num_steps),
        grid={**asdict(grid), "prices": [prices.gpu_hour or 0.0, prices.kwh or 0.0]},
        colours=variables(grid.recipes),
    )
