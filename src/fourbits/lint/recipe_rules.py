"""Rules about a recipe: what arXiv:2509.25149 found necessary, or harmful, for 4-bit pretraining."""

from collections.abc import Iterator

from fourbits.lint.finding import Finding, LintedRun, is_4_bits
from fourbits.recipe.recipe import GemmTable, has_4_bits

_PAPER = "arXiv:2509.25149"


def final_blocks(run: LintedRun) -> Iterator[Finding]:
    """The last blocks, whose gradients have the widest range, in 4 bits."""
    blocks = len(run.config.model.pattern)
    recipe = run.config.recipe
    keep, ends_higher = recipe.keep_bf16, any(phase.end == "end" for phase in recipe.schedule)
    if run.quantizes_to_4_bits and not keep.count_last(blocks) and not ends_higher:
        yield Finding(
            "final-blocks",
            f"all of the last blocks are quantized (keep_bf16.last_blocks {keep.last_blocks!r} of {blocks})",
            f"In {_PAPER} a 12B model diverged when the last blocks were in FP4.",
            "Set recipe.keep_bf16.last_blocks to '8/62', or let a late phase of recipe.schedule end in BF16.",
        )


def head(run: LintedRun) -> Iterator[Finding]:
    """The output head in 4 bits."""
    found = [row for row in run.summary.rows if row.name == "head" and "fp4" in row.precision]
    if found:
        yield Finding(
            "head",
            f"the output head is quantized to {found[0].precision}",
            "Its errors reach every token's loss directly; no published recipe quantizes it.",
            "Add 'head' to recipe.keep_bf16.names.",
        )


def stochastic_rounding(run: LintedRun) -> Iterator[Finding]:
    """4-bit gradients rounded to nearest, or more than gradients rounded stochastically."""
    for table in _with_4_bits(run):
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
                f"Set recipe.{nearest[0]}.lhs.rounding to sr.",
            )
        if is_4_bits(table.fprop.lhs) and (table.fprop.lhs.stochastic or table.fprop.rhs.stochastic):
            yield Finding(
                "forward-rounding",
                "X or W is rounded stochastically in the forward pass",
                f"It doubles the error of the forward pass and removes no bias that matters ({_PAPER}, 4.4).",
                "Set rounding to rne on both operands of recipe.fprop.",
            )


def forward_transform(run: LintedRun) -> Iterator[Finding]:
    """A Hadamard transform of the forward pass."""
    if any(table.fprop.lhs.rht or table.fprop.rhs.rht for table in _with_4_bits(run)):
        yield Finding(
            "forward-transform",
            f"fprop has a Hadamard transform of {run.config.recipe.fprop.lhs.rht}",
            f"W then has other values in Dgrad, and {_PAPER} measured no gain in the forward pass.",
            "Set recipe.fprop.lhs.rht and recipe.fprop.rhs.rht to 0, and keep it in wgrad.",
        )


def weight_consistency(run: LintedRun) -> Iterator[Finding]:
    """A weight whose values differ between Fprop and Dgrad."""
    for table in _with_4_bits(run):
        forward, backward = table.fprop.rhs, table.dgrad.rhs
        both = is_4_bits(forward) and is_4_bits(backward)
        if both and not table.shares_weight and backward.source != "forward":
            yield Finding(
                "weight-consistency",
                "W has other codes in Dgrad than in Fprop (blocks along each contraction)",
                f"The gradient is then not that of the forward pass ({_PAPER}, 4.3).",
                "Set block to [16, 16] on fprop.rhs and dgrad.rhs, or dgrad.rhs.source to forward.",
            )


def claimed_format(run: LintedRun) -> Iterator[Finding]:
    """A recipe called FP4 that computes little in 4 bits."""
    recipe, rows = run.config.recipe, run.summary.rows
    if "fp4" not in recipe.name.lower():
        return
    if not run.quantizes_to_4_bits:
        yield Finding(
            "claimed-format",
            f"recipe {recipe.name} has no 4-bit operand",
            "Reports and checkpoints would carry a name that is not true.",
            "Rename it, or set format to nvfp4 on its operands.",
        )
        return
    body = sum(row.size for row in rows if row.name != "head")
    share = sum(row.size for row in rows if row.quantized) / max(body, 1)
    if share < 0.5:
        yield Finding(
            "claimed-format",
            f"{share:.0%} of the blocks' weights are quantized",
            "Less than half of the GEMMs then gain from 4 bits, and a comparison says little about them.",
            "Keep fewer first and last blocks in BF16, or use a deeper model.",
        )


def _with_4_bits(run: LintedRun) -> list[GemmTable]:
    return [table for table in run.tables if has_4_bits(table)]


RECIPE_RULES = (
    final_blocks,
    head,
    stochastic_rounding,
    forward_transform,
    weight_consistency,
    claimed_format,
)
