"""Chooses the linear layers that stay in BF16 under a budget of FLOPs, and writes the recipe file."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourbits.compare.proxies.findings import Choice, LayerSensitivity, Sensitivity
from fourbits.compare.proxies.forward import forward_cost
from fourbits.compare.proxies.layers import flops_shares, layer_sensitivities, only
from fourbits.compare.proxies.measure import Checkpoint
from fourbits.compare.techniques.trained import without_kept_blocks
from fourbits.data.whole_file import write_whole
from fourbits.recipe.presets import RECIPES, get_recipe
from fourbits.recipe.recipe import GemmTable, KeepBF16, LayerRule, Recipe
from fourbits.settings import dump_yaml, to_dict

#: budget if none is given and the recipe keeps no blocks in BF16
DEFAULT_BUDGET = 0.15
#: resolution of the knapsack: budgets and shares in steps of 0.1 %
UNITS = 1000
WHY = "divergence that its forward causes, by fourbits compare --sensitivity"
_BLOCK = re.compile(r"blocks\.(\d+)\.")


def measure_sensitivity(found: Checkpoint, recipe: Recipe, budget: float | None = None) -> Sensitivity:
    """Rank the layers and choose those that stay in BF16. budget: share of FLOPs; None: the recipe's."""
    if budget is not None and not 0 < budget < 1:
        raise ValueError(
            f"--keep-flops: must be a share between 0 and 1, such as 0.15, got {budget:g}. Omit it for the "
            "share that the recipe keeps."
        )
    layers = layer_sensitivities(found, without_kept_blocks(recipe))
    shares = flops_shares(found)
    names = list(found.trained.layers)
    share = budget if budget is not None else own_share(recipe, names, shares) or DEFAULT_BUDGET

    def measured(kept: Sequence[str]) -> Choice:
        changed = only(keeping(recipe, kept), "fprop")
        cost = forward_cost(found.trained, found.exact, changed)
        return Choice(layers=tuple(kept), share_of_flops=sum(shares[name] for name in kept), cost=cost)

    return Sensitivity(
        run=str(found.run),
        checkpoint=found.sha256,
        step=found.trained.step,
        recipe=recipe.name,
        tokens=found.tokens,
        loss=found.exact.loss,
        layers=tuple(layers),
        budget=share,
        nothing=measured([]),
        proposal=measured(chosen(layers, share)),
        blocks=measured(whole_blocks(recipe, names, shares, share)),
    )


def chosen(layers: Sequence[LayerSensitivity], budget: float) -> list[str]:
    """The layers that fit and together cause the most divergence: a knapsack, in steps of 1 / UNITS.

    Divergences of single layers are added, because those of small independent errors add up.
    """
    capacity = int(budget * UNITS + 1e-6)
    best: list[tuple[float, tuple[str, ...]]] = [(0.0, ())] * (capacity + 1)
    for row in layers:
        size = max(1, math.ceil(row.share_of_flops * UNITS - 1e-6))
        for room in range(capacity, size - 1, -1):
            value, kept = best[room - size]
            best[room] = max(best[room], (value + row.fprop.divergence, (*kept, row.layer)))
    return list(best[capacity][1])


def own_share(recipe: Recipe, names: Sequence[str], shares: dict[str, float]) -> float:
    """The share of FLOPs in the first and last blocks that the recipe keeps in BF16."""
    blocks = _blocks(names)
    keep = recipe.keep_bf16
    kept = _in_blocks(names, blocks, keep.count_first(blocks), keep.count_last(blocks))
    return sum(shares[name] for name in kept)


def whole_blocks(recipe: Recipe, names: Sequence[str], shares: dict[str, float], budget: float) -> list[str]:
    """Layers of as many first and last blocks as fit, in the recipe's ratio; only last ones without."""
    blocks = _blocks(names)
    first, last = recipe.keep_bf16.count_first(blocks), recipe.keep_bf16.count_last(blocks)
    of_last = last / (first + last) if first + last else 1.0
    best: list[str] = []
    for number in range(1, blocks + 1):
        at_end = round(number * of_last)
        kept = _in_blocks(names, blocks, number - at_end, at_end)
        if sum(shares[name] for name in kept) <= budget + 1e-9:
            best = kept
    return best


def keeping(recipe: Recipe, layers: Sequence[str]) -> Recipe:
    """The recipe with these layers in BF16 instead of whole blocks."""
    everything = without_kept_blocks(recipe)
    rule = LayerRule(names=tuple(layers), table=GemmTable(), why=WHY)
    return replace(everything, layers=(*((rule,) if layers else ()), *everything.layers), schedule=())


def write_recipe(found: Sensitivity, recipe: Recipe, path: Path) -> Path:
    """The proposal as a file for `fourbits train --recipe FILE`, with `base` if the recipe is shipped."""
    kept = keeping(recipe, found.proposal.layers)
    keep = KeepBF16(names=recipe.keep_bf16.names)
    content: dict[str, Any] = {"name": path.stem}
    if recipe.name in RECIPES and recipe.digest == RECIPES[recipe.name].digest:
        rules = [
            {"names": list(rule.names), "table": _changes(rule.table), "why": rule.why}
            for rule in kept.layers
        ]
        blocks = {"first_blocks": keep.first_blocks, "last_blocks": keep.last_blocks}
        content |= {"base": recipe.name, "keep_bf16": blocks, "layers": rules}
    else:
        content = to_dict(kept) | content | {"source": f"{recipe.name}, changed", "taken": "", "deviates": ""}
    header = (
        f"# {recipe.name} with {found.proposal.share_of_flops:.1%} of linear-layer FLOPs in BF16, chosen on "
        f"step {found.step} of {found.run}\n# by fourbits compare --sensitivity: divergence "
        f"{found.proposal.cost.divergence:.5f} nats, {found.blocks.cost.divergence:.5f} with whole blocks.\n"
    )
    write_whole(path, (header + dump_yaml(content)).encode())
    assert get_recipe(path).digest == replace(kept, name=path.stem).digest, "the file is the proposal"
    return path


def _changes(table: GemmTable) -> dict[str, Any]:
    """The fields of a table that are not BF16's."""
    default = to_dict(GemmTable())
    return {name: value for name, value in to_dict(table).items() if value != default[name]}


def _blocks(names: Sequence[str]) -> int:
    """The number of the model's blocks, by the names of its layers."""
    return max((int(match[1]) + 1 for name in names if (match := _BLOCK.search(name))), default=0)


def _in_blocks(names: Sequence[str], blocks: int, first: int, last: int) -> list[str]:
    numbered = [(name, int(match[1])) for name in names if (match := _BLOCK.search(name))]
    return [name for name, block in numbered if block < first or block >= blocks - last]
