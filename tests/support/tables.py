"""Every table of GEMMs that a shipped recipe has, with packed inputs too, and layers that compute by them."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.recipe.presets import RECIPES
from fourbits.recipe.recipe import GemmTable, KeepBF16, Recipe


def _packed(table: GemmTable) -> list[GemmTable]:
    try:
        return [replace(table, saved_inputs="packed")]
    except ValueError:  # formats without packed inputs
        return []


def _tables() -> dict[str, GemmTable]:
    found: dict[str, GemmTable] = {}
    for recipe in RECIPES.values():
        for table in (recipe.table, *(rule.table for rule in recipe.layers)):
            for version in (table, *_packed(table)):
                if version not in found.values() and not version.fprop.high_precision:
                    packed = " packed" if version.saved_inputs == "packed" else ""
                    again = sum(name.startswith(recipe.name + packed) for name in found)
                    found[f"{recipe.name}{packed}{again or ''}"] = version
    return found


TABLES = _tables()


def converted(model: nn.Module, table: GemmTable, seed: int = 2) -> nn.Module:
    """The model with all of its linear layers under one table."""
    recipe = Recipe(
        name="custom",
        fprop=table.fprop,
        dgrad=table.dgrad,
        wgrad=table.wgrad,
        saved_inputs=table.saved_inputs,
        keep_bf16=KeepBF16(names=()),
    )
    convert(model, recipe, seed=seed)
    return model


class Parallel(nn.Module):
    """One layer per table, all reading the same input."""

    def __init__(self, tables: Iterable[GemmTable], width: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            converted(nn.Sequential(nn.Linear(width, out, bias=place % 2 == 0)), table)
            for place, table in enumerate(tables)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, width] -> [tables, M, out]."""
        return torch.stack([layer(x) for layer in self.layers])
