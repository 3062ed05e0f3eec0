"""Rules about a recipe: what arXiv:2509.25149 found necessary, or harmful, for 4-bit pretraining."""

from collections.abc import Iterator

from fourbits.linear.selection import matches
from fourbits.lint.finding import Finding, LintedRun, is_4_bits
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmTable, has_4_bits

_PAPER = "arXiv:2509.25149"


#: the smallest share of last blocks in BF16 that arXiv:2509.25149 reports: 4 of 62, in its ablations
_LAST_BLOCKS = 4 / 62


def final_blocks(run: LintedRun) -> Iterator[Finding]:
    """The last blocks, whose gradients have the widest range, are quantized to 4 bits."""
    blocks = len(run.config.model.pattern)
    recipe = run.config.recipe
    last = recipe.keep_bf16.last_blocks
    ends_higher = any(phase.end == "end" for phase in recipe.schedule)
    quantized = [int(row.name.split(".")[1]) for row in run.rows_of_4_bits if row.name.startswith("blocks.")]
    kept = blocks - 1 - max(quantized, default=-1)
    if quantized and kept < _LAST_BLOCKS * blocks and not ends_higher:
        yield Finding(
            "final-blocks",
            f"{kept} of the last blocks have no 4-bit layer, of {blocks} (keep_bf16.last_blocks {last!r})",
            f"In {_PAPER} a 12B model diverged with its last blocks in FP4; 8 of 62 were kept in BF16, and 4 "
            "in ablations.",
            "Set recipe.keep_bf16.last_blocks to '8/62', or let a late phase of recipe.schedule end in BF16.",
        )


def head(run: LintedRun) -> Iterator[Finding]:
    """The recipe tries to quantize the output head or the embedding."""
    recipe = run.config.recipe
    if all(table.high_precision for table in run.tables.values()):
        return
    ruled = [
        pattern
        for rule in recipe.layers
        for pattern in rule.names
        if not rule.table.fprop.high_precision
        and pattern != "*"
        and any(matches(name, (pattern,)) for name in ("head", "embedding"))
    ]
    why = "Its errors reach every token's loss directly, and no published recipe quantizes it."
    if not matches("head", recipe.keep_bf16.names):
        yield Finding(
            "head",
            f"no pattern of keep_bf16.names matches the output head, got {list(recipe.keep_bf16.names)}",
            f"{why} fourbits keeps this model's head in BF16 by its place, but not every model's.",
            "Add 'head' and 'lm_head' to recipe.keep_bf16.names.",
        )
    elif ruled:
        yield Finding(
            "head",
            f"recipe.layers quantizes the head or the embedding ({', '.join(ruled)})",
            f"{why} fourbits keeps both in BF16, so the rule does nothing.",
            "Remove the pattern from recipe.layers.",
        )


def stochastic_rounding(run: LintedRun) -> Iterator[Finding]:
    """4-bit gradients are rounded to nearest, or other operands than gradients stochastically."""
    for place, table in _with_4_bits(run).items():
        nearest = [
            name
            for name in ("dgrad", "wgrad")
            if is_4_bits(getattr(table, name).lhs) and not getattr(table, name).lhs.stochastic
        ]
        if nearest:
            yield Finding(
                "gradient-rounding",
                f"dY is rounded to nearest in {' and '.join(nearest)}",
                f"Its error is then biased, and does not average out over steps ({_PAPER}, 4.4).",
                f"Set {' and '.join(f'{place}.{name}.lhs.rounding' for name in nearest)} to sr.",
            )
        if is_4_bits(table.fprop.lhs) and (table.fprop.lhs.stochastic or table.fprop.rhs.stochastic):
            yield Finding(
                "forward-rounding",
                "X or W is rounded stochastically in the forward pass",
                f"It doubles the error of the forward pass and removes no bias that matters ({_PAPER}, 4.4).",
                f"Set rounding to rne on both operands of {place}.fprop.",
            )


def forward_transform(run: LintedRun) -> Iterator[Finding]:
    """The recipe has a Hadamard transform in the forward pass."""
    for place, table in _with_4_bits(run).items():
        if table.fprop.lhs.rht:  # that of both operands
            yield Finding(
                "forward-transform",
                f"fprop has a Hadamard transform of {table.fprop.lhs.rht}",
                f"W then has other values in Dgrad, and {_PAPER} measured no gain in the forward pass.",
                f"Set {place}.fprop.lhs.rht and {place}.fprop.rhs.rht to 0, and keep it in wgrad.",
            )


def weight_consistency(run: LintedRun) -> Iterator[Finding]:
    """A weight has different values in Fprop and Dgrad."""
    for place, table in _with_4_bits(run).items():
        forward, backward = table.fprop.rhs, table.dgrad.rhs
        both = forward.block_format.quantized and backward.block_format.quantized
        if both and not table.shares_weight and backward.source != "forward":
            yield Finding(
                "weight-consistency",
                f"W has other codes in Dgrad than in Fprop ({_difference(forward, backward)})",
                f"The gradient is then not that of the forward pass ({_PAPER}, 4.3).",
                "Set one format, square blocks ([16, 16] for nvfp4), rounding rne and rht 0 on "
                f"{place}.fprop.rhs and {place}.dgrad.rhs, or {place}.dgrad.rhs.source to forward.",
            )


def _difference(forward: OperandSpec, backward: OperandSpec) -> str:
    """Why W's codes in Dgrad are not those of Fprop."""
    if forward.format != backward.format:
        return f"{backward.format} after {forward.format}"
    if forward.rht or backward.rht:
        return "a Hadamard transform"
    if forward.stochastic or backward.stochastic:
        return "stochastic rounding"
    if not (forward.square and backward.square):
        return "blocks along each contraction"
    return "other settings of the operand"


def claimed_format(run: LintedRun) -> Iterator[Finding]:
    """A recipe named after FP4 computes little in 4 bits."""
    recipe, rows = run.config.recipe, run.summary.rows
    if "fp4" not in recipe.name.lower():
        return
    if not run.quantizes_to_4_bits:
        yield Finding(
            "claimed-format",
            f"recipe {recipe.name} has no 4-bit operand",
            "Reports and checkpoints would carry a misleading name.",
            "Rename it, or set format to nvfp4 on its operands.",
        )
        return
    body = sum(row.size for row in rows if row.name != "head")
    share = sum(row.size for row in run.rows_of_4_bits) / max(body, 1)
    if share < 0.5:
        yield Finding(
            "claimed-format",
            f"{share:.0%} of the blocks' weights are quantized to 4 bits",
            "Less than half of the GEMMs then gain from 4 bits, and a comparison says little about them.",
            "Quantize more layers to 4 bits, rename the recipe, or use a deeper model.",
        )


def _with_4_bits(run: LintedRun) -> dict[str, GemmTable]:
    return {place: table for place, table in run.tables.items() if has_4_bits(table)}


RECIPE_RULES = (
    final_blocks,
    head,
    stochastic_rounding,
    forward_transform,
    weight_consistency,
    claimed_format,
)
