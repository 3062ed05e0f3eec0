"""Published recipes as data, and how a recipe is named. docs/nvfp4.md, section 14 has the table and the
deviations.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, KeepBF16, Recipe
from fourbits.settings import build, load_yaml, nearest, to_dict

_PAPER_BLOCKS = KeepBF16(first_blocks="2/62", last_blocks="8/62")

_ROW = OperandSpec()
_ROW_SR = OperandSpec(rounding="sr")
_TILE = OperandSpec(block=(16, 16), source="bf16")
_NVFP4_DGRAD = GemmSpec(lhs=_ROW_SR, rhs=_TILE)
_NVFP4_WGRAD = GemmSpec(lhs=replace(_ROW_SR, rht=16), rhs=replace(_ROW, rht=16))

_NAIVE = GemmSpec(lhs=_ROW, rhs=_ROW)
_NAIVE_WEIGHT = GemmSpec(lhs=_ROW, rhs=replace(_ROW, source="bf16"))

_MX4 = OperandSpec(format="mxfp4")
_MX4_SR = OperandSpec(format="mxfp4", rounding="sr")
_MX4_TILE = OperandSpec(format="mxfp4", block=(32, 32), source="bf16")

_FP8 = OperandSpec(format="fp8", block=(1, 128))
_FP8_TILE = OperandSpec(format="fp8", block=(128, 128), source="bf16")

_RECIPES = (
    Recipe(name="bf16", source="All GEMMs in BF16."),
    Recipe(
        name="fp8",
        source="arXiv:2509.25149, its FP8 baseline: E4M3 in 1x128 and 128x128 blocks, FP32 scales, first 1 "
        "and last 2 of 62 blocks in BF16, scaled to the model's depth.",
        fprop=GemmSpec(lhs=_FP8, rhs=_FP8_TILE),
        dgrad=GemmSpec(lhs=_FP8, rhs=_FP8_TILE),
        wgrad=GemmSpec(lhs=_FP8, rhs=_FP8),
        keep_bf16=KeepBF16(first_blocks="1/62", last_blocks="2/62"),
    ),
    Recipe(
        name="mxfp4",
        source="arXiv:2509.25149, the MXFP4 of its comparison: RHT 32 on Wgrad, SR on gradients, OCP "
        "scales. Deviates: weights in 32x32 blocks; BF16 blocks as nvfp4, so that a comparison differs "
        "in format only.",
        fprop=GemmSpec(lhs=_MX4, rhs=_MX4_TILE),
        dgrad=GemmSpec(lhs=_MX4_SR, rhs=_MX4_TILE),
        wgrad=GemmSpec(lhs=replace(_MX4_SR, rht=32), rhs=replace(_MX4, rht=32)),
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="nvfp4",
        source="arXiv:2509.25149, whole: 2D weights, RHT 16 on Wgrad, SR on gradients, first 2 and last 8 "
        "of 62 blocks in BF16, scaled to the model's depth.",
        fprop=GemmSpec(lhs=_ROW, rhs=_TILE),
        dgrad=_NVFP4_DGRAD,
        wgrad=_NVFP4_WGRAD,
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="nvfp4-naive",
        source="arXiv:2509.25149, the base method of its ablations: every operand 1x16, to nearest even, no "
        "BF16 blocks.",
        fprop=_NAIVE_WEIGHT,
        dgrad=_NAIVE_WEIGHT,
        wgrad=_NAIVE,
    ),
)

RECIPES = MappingProxyType({recipe.name: recipe for recipe in _RECIPES})


def list_recipes() -> tuple[str, ...]:
    """Names of the shipped recipes."""
    return tuple(RECIPES)


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """A shipped recipe by name, or one read from a YAML file. ValueError names the nearest recipe or key.

    A file may begin from a shipped recipe with `base: NAME` and states only what differs.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe) in RECIPES:
        return RECIPES[str(recipe)]
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        return recipe_from_mapping(load_yaml(path), str(path), path.stem)
    raise ValueError(
        f"recipe: no recipe is called {str(recipe)!r}.{nearest(str(recipe), list_recipes())} "
        f"Shipped: {', '.join(RECIPES)}; or name a .yaml file."
    )


def recipe_from_mapping(mapping: dict[str, object], where: str, name: str = "custom") -> Recipe:
    """A recipe from nested dicts, on top of the shipped recipe that its `base` names, if any.

    where begins every error, e.g. a file name; name is used where the mapping gives none.
    """
    changes = dict(mapping)
    base = changes.pop("base", None)
    tree: dict[str, object] = {"name": name}
    if base is not None:
        if str(base) not in RECIPES:
            raise ValueError(
                f"{where}: base must be a shipped recipe, got {base!r}.{nearest(str(base), list_recipes())} "
                f"Shipped: {', '.join(RECIPES)}."
            )
        tree = _merged(to_dict(RECIPES[str(base)]), {"name": name, "source": f"{base}, changed."})
    return build(Recipe, _merged(tree, changes), where)


def _merged(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """base with changes laid over it, mapping by mapping."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result
