"""Ablations: a recipe without one of its techniques, everything else unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, GemmTable, KeepBF16, Recipe
from fourbits.settings import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """A technique that can be removed from a recipe. what: in words; operand: an operand without it.

    operand is None for a technique of the recipe rather than of operands: the blocks that stay in BF16.
    """

    what: str
    operand: Callable[[OperandSpec], OperandSpec] | None


def _without_transform(spec: OperandSpec) -> OperandSpec:
    return replace(spec, rht=0, rht_signs="")


def _without_stochastic_rounding(spec: OperandSpec) -> OperandSpec:
    rounding = "rne" if spec.rounding in ("sr", "sr32") else spec.rounding
    return replace(spec, rounding=rounding, scale_rounding="rne", sr_headroom=False)


def _without_square_blocks(spec: OperandSpec) -> OperandSpec:
    size = spec.block_size
    if size is None or size[0] == 1 or size[0] != size[1]:
        return spec
    return replace(spec, block=(1, size[1]))


def _without_four_over_six(spec: OperandSpec) -> OperandSpec:
    return replace(spec, scale_rule="max") if spec.scale_rule.startswith("4over6") else spec


TECHNIQUES: Mapping[str, Technique] = MappingProxyType(
    {
        "rht": Technique(what="random Hadamard transform", operand=_without_transform),
        "sr": Technique(what="stochastic rounding", operand=_without_stochastic_rounding),
        "2d": Technique(what="square weight blocks", operand=_without_square_blocks),
        "4over6": Technique(what="Four Over Six scales", operand=_without_four_over_six),
        "bf16-blocks": Technique(what="first and last blocks in BF16", operand=None),
    }
)


def ablation_name(recipe: str, technique: str) -> str:
    """The name of a recipe without a technique: nvfp4-without-rht."""
    return f"{recipe}-without-{technique}"


def without(recipe: Recipe, technique: str) -> Recipe:
    """The recipe without one of TECHNIQUES, under the name of `ablation_name`.

    Raises ValueError for an unknown technique, for one that the recipe does not use, and for one on which
    the rest of the recipe depends.
    """
    if technique not in TECHNIQUES:
        raise ValueError(
            f"--ablate: must name techniques, got {technique!r}.{nearest(technique, list(TECHNIQUES))} "
            f"Techniques: {', '.join(TECHNIQUES)}."
        )
    try:
        found = _removed(recipe, TECHNIQUES[technique])
    except ValueError as error:
        raise ValueError(
            f"--ablate: {technique} cannot be removed from {recipe.name}, because the rest of it needs "
            f"{technique} ({error}) Remove {technique} from --ablate."
        ) from None
    if found.digest == recipe.digest:
        raise ValueError(f"--ablate: {recipe.name} does not use {technique}. {_remedy(used(recipe))}")
    return replace(
        found,
        name=ablation_name(recipe.name, technique),
        source=f"{recipe.name}, changed",
        taken=f"{recipe.name} without {TECHNIQUES[technique].what}",
        deviates="",
    )


def used(recipe: Recipe) -> list[str]:
    """The techniques that a recipe uses and that can be removed from it, in the order of TECHNIQUES."""
    names: list[str] = []
    for name, technique in TECHNIQUES.items():
        try:
            changed = _removed(recipe, technique).digest != recipe.digest
        except ValueError:
            changed = False
        if changed:
            names.append(name)
    return names


def _removed(recipe: Recipe, technique: Technique) -> Recipe:
    change = technique.operand
    if change is None:
        keep: KeepBF16 = replace(recipe.keep_bf16, first_blocks=0, last_blocks=0)
        return replace(recipe, keep_bf16=keep)
    rules = [replace(rule, table=replace(rule.table, **_gemms(rule.table, change))) for rule in recipe.layers]
    return replace(recipe, **_gemms(recipe.table, change), layers=tuple(rules))


def _gemms(table: GemmTable, change: Callable[[OperandSpec], OperandSpec]) -> dict[str, GemmSpec]:
    """The three GEMMs of a table with both operands changed."""
    gemms = {name: getattr(table, name) for name in ("fprop", "dgrad", "wgrad")}
    return {name: GemmSpec(lhs=change(gemm.lhs), rhs=change(gemm.rhs)) for name, gemm in gemms.items()}


def _remedy(names: Sequence[str]) -> str:
    if not names:
        return "It uses none that can be removed. Ablate another recipe."
    return f"It uses {', '.join(names)}. Name one of these."
