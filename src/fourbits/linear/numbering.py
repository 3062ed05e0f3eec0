"""The numbers of the layers of one call of `convert`, which distinguish their random streams.

One call of `convert` numbers its layers from 0 on. Where parts of a model were converted one by one, its
first `set_step` moves the numbers of the later ones past those of the earlier ones.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from fourbits.linear.blend import BlendWeight
from fourbits.linear.selection import Selection
from fourbits.recipe.recipe import Recipe
from fourbits.recipe.schedule import Stage


class Numbering:
    """The numbers that one call of `convert` gave: [first, first + layers), for one seed."""

    __slots__ = ("blends", "first", "layers", "recipe", "seed", "selection", "stage", "weights")

    def __init__(self, seed: int, layers: int, weights: int, recipe: Recipe, selection: Selection) -> None:
        self.seed, self.layers, self.first = seed, layers, 0
        #: the recipe that was applied, with the caller's numbers of blocks in BF16
        self.recipe = recipe
        #: the caller's choice of layers, which a change of the recipe keeps
        self.selection = selection
        #: how many weights GEMMs read in what was converted, quantized or not
        self.weights = weights
        #: which phases of the recipe's schedule are active, and the weights of those that blend, by device
        self.stage = Stage()
        self.blends: dict[torch.device, BlendWeight] = {}

    @property
    def end(self) -> int:
        """The number after its last one."""
        return self.first + self.layers


class Numbered(Protocol):
    """A layer's state, which holds its number."""

    layer: int
    numbering: Numbering | None


def make_distinct(states: Iterable[Numbered]) -> None:
    """Give layers from different calls of `convert` different numbers, in the order of the layers.

    Numbers that do not collide stay, so that a later call changes nothing.
    """
    groups: dict[int, list[Numbered]] = {}
    for state in states:
        groups.setdefault(id(state.numbering), []).append(state)
    placed: list[Numbering] = []
    for group in groups.values():
        numbering = group[0].numbering
        if numbering is None:
            continue
        others = [other for other in placed if other.seed == numbering.seed]
        if any(other.first < numbering.end and numbering.first < other.end for other in others):
            moved = max(other.end for other in others) - numbering.first
            numbering.first += moved
            for state in group:
                state.layer += moved
        placed.append(numbering)
