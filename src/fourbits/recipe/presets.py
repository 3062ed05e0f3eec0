"""Published recipes as data, and look-up by name. docs/nvfp4.md, section 14, lists their deviations."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fourbits.quant.operand import OperandSpec
from fourbits.recipe.overrides import gemms_with_both_sides
from fourbits.recipe.recipe import GemmSpec, GemmTable, KeepBF16, LayerRule, Recipe
from fourbits.recipe.schedules import get_schedule
from fourbits.settings import build, load_yaml, nearest, to_dict

_PAPER_BLOCKS = KeepBF16(first_blocks="2/62", last_blocks="8/62")

_ROW = OperandSpec()
_ROW_SR = OperandSpec(rounding="sr")
_BLOCK_2D = OperandSpec(block=(16, 16), source="bf16")
_NVFP4_DGRAD = GemmSpec(lhs=_ROW_SR, rhs=_BLOCK_2D)
_NVFP4_WGRAD = GemmSpec(lhs=replace(_ROW_SR, rht=16), rhs=replace(_ROW, rht=16))

_ROW_46 = replace(_ROW, scale_rule="4over6-mse")
_BLOCK_2D_46 = replace(_BLOCK_2D, scale_rule="4over6-mse")

_NAIVE = GemmSpec(lhs=_ROW, rhs=_ROW)
_NAIVE_WEIGHT = GemmSpec(lhs=_ROW, rhs=replace(_ROW, source="bf16"))

_MX4 = OperandSpec(format="mxfp4")
_MX4_SR = OperandSpec(format="mxfp4", rounding="sr")
_MX4_BLOCK_2D = OperandSpec(format="mxfp4", block=(32, 32), source="bf16")

_MX8 = OperandSpec(format="mxfp8", scale_rule="ceil")
_MX8_WEIGHT = replace(_MX8, source="bf16")
_MXFP8 = GemmTable(
    fprop=GemmSpec(lhs=_MX8, rhs=_MX8_WEIGHT),
    dgrad=GemmSpec(lhs=_MX8, rhs=_MX8_WEIGHT),
    wgrad=GemmSpec(lhs=_MX8, rhs=_MX8),
)

_EDEN = OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call")
_EDEN_FORWARD = replace(_EDEN, source="forward")
_QUARTET2_BACKWARD = GemmSpec(lhs=_EDEN, rhs=_EDEN_FORWARD)
_QUARTET2_TAKEN = (
    "1x16 weights, MS-EDEN on all four backward operands, W and X re-quantized from the forward operands, "
    "no BF16 blocks"
)
_QUARTET2_DEVIATES = (
    "ties to even (the authors' simulation: ties away from zero); one multiplication by a rounded "
    "reciprocal per block instead of a division per element; rounding to BF16 after the rotation; "
    "underflowed blocks have scale 0 instead of scale 1 with zero codes; signs drawn per layer, GEMM and "
    "optimizer step instead of one running product per call; rows padded to multiples of 128"
)

_FP8 = OperandSpec(format="fp8", block=(1, 128))
_FP8_BLOCK_2D = OperandSpec(format="fp8", block=(128, 128), source="bf16")


def _ceil(spec: OperandSpec) -> OperandSpec:
    return replace(spec, scale_rule="ceil")


_RECIPES = (
    Recipe(name="bf16", taken="all GEMMs in BF16"),
    Recipe(
        name="fp8",
        source="arXiv:2509.25149",
        taken="the paper's FP8 baseline: blocks of 1x128 and 128x128, E4M3, RNE, BF16 blocks",
        deviates="the number of BF16 blocks, 1 + 2 of 62, scales with the depth of the model, as in nvfp4",
        fprop=GemmSpec(lhs=_FP8, rhs=_FP8_BLOCK_2D),
        dgrad=GemmSpec(lhs=_FP8, rhs=_FP8_BLOCK_2D),
        wgrad=GemmSpec(lhs=_FP8, rhs=_FP8),
        keep_bf16=KeepBF16(first_blocks="1/62", last_blocks="2/62"),
    ),
    Recipe(
        name="mxfp8",
        source="arXiv:2506.08027",
        taken="E4M3 in 1x32 blocks everywhere, scales rounded up",
        deviates="none known; the paper keeps embedding and head in BF16, too",
        fprop=_MXFP8.fprop,
        dgrad=_MXFP8.dgrad,
        wgrad=_MXFP8.wgrad,
    ),
    Recipe(
        name="mxfp4",
        source="arXiv:2509.25149",
        taken="the MXFP4 baseline of the paper's comparison: RHT 32, SR on gradients, OCP scale (floor)",
        deviates="32x32 weights, so that forward and backward use the same values; BF16 blocks as in "
        "nvfp4, so that the two differ in format only",
        fprop=GemmSpec(lhs=_MX4, rhs=_MX4_BLOCK_2D),
        dgrad=GemmSpec(lhs=_MX4_SR, rhs=_MX4_BLOCK_2D),
        wgrad=GemmSpec(lhs=replace(_MX4_SR, rht=32), rhs=replace(_MX4, rht=32)),
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="mxfp4-ceil",
        source="arXiv:2509.25149, with the scales of arXiv:2506.08027",
        taken="mxfp4 with every scale rounded up, so that no maximum is clipped and SR is unbiased",
        deviates="as mxfp4; the second paper rounds scales up for MXFP8",
        fprop=GemmSpec(lhs=_ceil(_MX4), rhs=_ceil(_MX4_BLOCK_2D)),
        dgrad=GemmSpec(lhs=_ceil(_MX4_SR), rhs=_ceil(_MX4_BLOCK_2D)),
        wgrad=GemmSpec(lhs=_ceil(replace(_MX4_SR, rht=32)), rhs=_ceil(replace(_MX4, rht=32))),
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="nvfp4",
        source="arXiv:2509.25149",
        taken="the full recipe: 16x16 weights, RHT 16 on Wgrad, SR on gradients, BF16 blocks",
        deviates="the number of BF16 blocks, 2 + 8 of 62, scales with the depth of the model",
        fprop=GemmSpec(lhs=_ROW, rhs=_BLOCK_2D),
        dgrad=_NVFP4_DGRAD,
        wgrad=_NVFP4_WGRAD,
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="nvfp4-naive",
        source="arXiv:2509.25149",
        taken="the base method of the paper's ablations: 1x16 blocks and RNE everywhere, no BF16 blocks",
        deviates="none",
        fprop=_NAIVE_WEIGHT,
        dgrad=_NAIVE_WEIGHT,
        wgrad=_NAIVE,
    ),
    Recipe(
        name="nvfp4-fwd",
        source="arXiv:2509.25149",
        taken="NVFP4 forward, BF16 backward: an ablation suggested by the paper",
        deviates="not a recipe from the paper",
        fprop=GemmSpec(lhs=_ROW, rhs=_BLOCK_2D),
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="nvfp4-46",
        source="arXiv:2512.02010",
        taken="Four Over Six on top of nvfp4, for the forward operands: choice by MSE, scale bound 256",
        deviates="gradients and X in Wgrad keep the max rule, as in TransformerEngine; the authors' "
        "library can apply Four Over Six to gradients, too",
        fprop=GemmSpec(lhs=_ROW_46, rhs=_BLOCK_2D_46),
        dgrad=GemmSpec(lhs=_ROW_SR, rhs=_BLOCK_2D_46),
        wgrad=_NVFP4_WGRAD,
        keep_bf16=_PAPER_BLOCKS,
    ),
    Recipe(
        name="quartet2",
        source="arXiv:2601.22813",
        taken=_QUARTET2_TAKEN,
        deviates=_QUARTET2_DEVIATES + "; forward bound 448 instead of 447.99",
        fprop=_NAIVE_WEIGHT,
        dgrad=_QUARTET2_BACKWARD,
        wgrad=_QUARTET2_BACKWARD,
    ),
    Recipe(
        name="quartet2-46",
        source="arXiv:2601.22813",
        taken=_QUARTET2_TAKEN + "; Four Over Six in the forward",
        deviates=_QUARTET2_DEVIATES,
        fprop=GemmSpec(lhs=_ROW_46, rhs=replace(_ROW_46, source="bf16")),
        dgrad=_QUARTET2_BACKWARD,
        wgrad=_QUARTET2_BACKWARD,
    ),
    Recipe(
        name="nemotron3-super",
        source="the report of Nemotron 3 Super, section 2.2",
        taken="nvfp4, but the attention projections (q, k, v, o) and the last 15 % of blocks stay in BF16, "
        "and all six operands of Mamba's out_proj are mxfp8 1x32 rne ceil",
        deviates="without latent projections and MTP",
        fprop=GemmSpec(lhs=_ROW, rhs=_BLOCK_2D),
        dgrad=_NVFP4_DGRAD,
        wgrad=_NVFP4_WGRAD,
        keep_bf16=KeepBF16(last_blocks="15/100"),
        layers=(
            LayerRule(
                names=("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"),
                table=GemmTable(),
                why="attention projection",
            ),
            LayerRule(
                names=("*.mixer.out_proj", "*.mamba.out_proj"), table=_MXFP8, why="Mamba output projection"
            ),
        ),
    ),
)

RECIPES = MappingProxyType({recipe.name: recipe for recipe in _RECIPES})


def list_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes."""
    return tuple(RECIPES)


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """A shipped recipe by name, or one read from a YAML file. Errors suggest the nearest recipe or key.

    "nvfp4+late-forward" is a shipped recipe with a shipped schedule. A file may start from a shipped recipe
    with `base: NAME` and set only what differs; a transform set on one operand applies to both operands of
    its GEMM.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"recipe: must be a name, a .yaml file or a Recipe, got {type(recipe).__name__}.")
    if str(recipe) in RECIPES:
        return RECIPES[str(recipe)]
    base, plus, schedule = str(recipe).partition("+")
    if plus and base in RECIPES:
        return _with_schedule(RECIPES[base], schedule)
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(
                f"recipe: {str(path)!r} must be a file, and there is none. Pass its path, or a shipped name: "
                f"{', '.join(RECIPES)}."
            )
        return recipe_from_mapping(load_yaml(path), str(path), path.stem)
    raise ValueError(
        f"recipe: no recipe is called {str(recipe)!r}.{nearest(str(recipe), list_recipes())} "
        f"Shipped: {', '.join(RECIPES)}. Pass one of them, or a .yaml file."
    )


def _with_schedule(recipe: Recipe, schedule: str) -> Recipe:
    """A shipped recipe with a shipped schedule, under both names."""
    return replace(
        recipe,
        name=f"{recipe.name}+{schedule}",
        taken=f"{recipe.taken}; schedule {schedule}",
        schedule=get_schedule(schedule),
    )


def credited(recipe: Recipe) -> Recipe:
    """The recipe, without the credits of the shipped one if its settings were changed."""
    shipped = RECIPES.get(recipe.name)
    if shipped is None or recipe.digest == shipped.digest or recipe.source != shipped.source:
        return recipe
    return replace(recipe, **_credits_of_changed(recipe.name))


def _credits_of_changed(name: str) -> dict[str, object]:
    return {"source": f"{name}, changed", "taken": "", "deviates": ""}


def recipe_from_mapping(mapping: dict[str, object], where: str, name: str = "custom") -> Recipe:
    """A recipe from nested dicts, on top of the shipped recipe named by `base`, if any.

    where: the prefix of every error, e.g. a file name. name: used where the mapping has none.
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
        tree = _merged(to_dict(RECIPES[str(base)]), {"name": name} | _credits_of_changed(str(base)))
        changes = gemms_with_both_sides(changes)
    if isinstance(named := changes.get("schedule"), str):
        changes["schedule"] = to_dict(get_schedule(named))
    return build(Recipe, _merged(tree, changes), where)


def _merged(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """base, updated recursively with changes."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result
