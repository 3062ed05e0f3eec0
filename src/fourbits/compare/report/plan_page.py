"""The page of a plan: a grid of plans computed in advance, and controls that choose among them.

The page only computes the cost, from hours, energy and two prices, and looks up everything else.
"""

from typing import Any

from fourbits.compare.number_format import count, short_count
from fourbits.compare.report.colours import palette, variables
from fourbits.compare.report.page import render_page
from fourbits.compare.report.plan_tables import (
    ALTERNATIVES,
    MEMORY_NAMES,
    alternative_rows,
    checkpoint_rows,
    gains_table,
    layout_rows,
    layout_text,
    model_table,
)
from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import Prices
from fourbits.plan.grid import Cell, Grid

#: the values that plan.js looks up
State = dict[str, Any]


def plan_page(name: str, grid: Grid, prices: Prices) -> str:
    """The HTML of a plan. prices: the initial prices on the page."""
    plan, train = grid.plan, grid.plan.config.train
    return render_page(
        "plan.html",
        title=f"{name} on {plan.gpu.name}",
        palette=palette(grid.recipes),
        name=name,
        gpu=plan.gpu.name,
        parameters=short_count(sum(plan.parameters.values())),
        tokens=short_count(plan.tokens),
        steps=count(train.num_steps),
        recipes=grid.recipes,
        alternatives=ALTERNATIVES,
        start=f"{plan.gpus:,} {plan.gpu.name}, sequences of {train.seq_len:,}, {plan.config.recipe.name}",
        tables={"What 4 bits can gain": gains_table(plan), "Parameters and FLOPs": model_table(name, plan)},
        assumptions=assumptions(plan),
        state=page_state(grid, prices),
        colours=variables(grid.recipes),
    )


def page_state(grid: Grid, prices: Prices) -> State:
    """Everything that the page's script looks up; cells by "RECIPE/LENGTH/GPUS"."""
    config = grid.plan.config
    return {
        "gpus": grid.gpus,
        "lengths": grid.lengths,
        "recipes": grid.recipes,
        "start": f"{config.recipe.name}/{config.train.seq_len}/{grid.plan.gpus}",
        "prices": [prices.gpu_hour or 0.0, prices.kwh or 0.0],
        "cells": {
            f"{recipe}/{length}/{gpus}": None
            if cell is None
            else _plain(cell, grid.cells["bf16", length, gpus])
            for (recipe, length, gpus), cell in grid.cells.items()
        },
    }


def _plain(cell: Cell, base: Cell | None) -> State:
    found, memory, step = cell.estimate, cell.estimate.choice.memory, cell.estimate.choice.step
    ratio = None if base is None else found.tokens_per_second / base.estimate.tokens_per_second
    return {
        "units": found.units,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "per_gpu": found.per_gpu,
        "mfu": found.mfu,
        "of_bf16": ratio,
        "memory_bytes": memory.total,
        "step_seconds": found.step_seconds,
        "gpu_hours": found.gpu_hours,
        "megawatt_hours": found.megawatt_hours,
        "cannot_run": found.cannot_run,
        "layout_text": layout_text(found.choice.layout),
        "layout": layout_rows(cell.config, found)[: -1 if found.cannot_run else None],
        "memory": [[MEMORY_NAMES[part], size] for part, size in memory.parts.items() if size],
        "alternatives": alternative_rows(cell.alternatives, found.gpu),
        "step": [[part, step.parts[part]] for part in sorted(step.parts, key=lambda part: -step.parts[part])],
        "checkpoints": checkpoint_rows(cell.config, found, cell.failures),
    }
