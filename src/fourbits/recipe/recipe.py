"""Recipe: the table of the three GEMMs, and which linear layers keep BF16.

One frozen, typed object: a precision baseline is another table, not other code. docs/nvfp4.md, sections 2
and 14.
"""

import functools
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from fourbits.gemm.sums import Epilogue, Sums
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.oscillation import Oscillation
from fourbits.recipe.schedule import PrecisionPhase, RunShape, resolved
from fourbits.recipe.table_rules import broken_rule
from fourbits.settings import build, to_dict

BF16 = OperandSpec(format="bf16")

#: role -> the Fprop operand that a source of `forward` refers to
_MAY_BE_FORWARD = {
    "fprop.lhs": None,
    "fprop.rhs": None,
    "dgrad.lhs": None,
    "dgrad.rhs": "fprop.rhs",
    "wgrad.lhs": None,
    "wgrad.rhs": "fprop.lhs",
}


#: settings of a recipe or table that do not affect results bitwise
_NOT_BITWISE = ("name", "source", "taken", "deviates", "saved_inputs", "native", "amax_reduction")
#: settings that were added after the first digests; where they are empty, they do not change a digest
_NEWER = (
    *("correction", "error_feedback", "feedback_interval", "shared_weight_amax", "schedule"),
    "oscillation",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """Both operands of one GEMM. Raises ValueError if their transforms would not cancel."""

    lhs: OperandSpec = BF16
    rhs: OperandSpec = BF16

    def __post_init__(self) -> None:
        if self.lhs.transform != self.rhs.transform:
            raise ValueError(
                f"GemmSpec: both operands must have the same transform, which cancels only then, got "
                f"{self.lhs.transform} (lhs) and {self.rhs.transform} (rhs). Set rht and rht_signs alike on "
                "both."
            )

    @property
    def high_precision(self) -> bool:
        """Whether both operands stay unquantized."""
        return not (self.lhs.block_format.quantized or self.rhs.block_format.quantized)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """The three GEMMs of a linear layer: Y = X W^T, dX = dY W, dW = dY^T X."""

    fprop: GemmSpec = field(default_factory=GemmSpec)
    dgrad: GemmSpec = field(default_factory=GemmSpec)
    wgrad: GemmSpec = field(default_factory=GemmSpec)
    #: how a layer saves X for Wgrad: as a dequantized operand, or as codes and scales, which hold the same
    #: values in less memory
    saved_inputs: Literal["exact", "packed"] = "exact"
    #: whether rows of dY (tokens) far above the typical one are scaled down before dY is quantized
    gradient_rows: Literal["any", "limited"] = "any"
    #: share of X's features, those with the largest magnitudes, whose quantization error is added back
    hot_channels: float = 0.0
    #: how GEMMs of quantized operands add: FP32 in the device's order, exactly, or as a chip's tensor cores
    sums: Sums = "fp32"
    #: how both global scales multiply those sums; fp32 sums take them one after the other
    epilogue: Epilogue = "separate"
    #: the GEMMs that run on FP4 tensor cores; set by `convert`, not by a recipe
    native: tuple[Literal["fprop", "dgrad", "wgrad"], ...] = ()
    #: the registered function that reduces the amaxes of a layer that is a shard by features; set by
    #: `shard_features`, not by a recipe
    amax_reduction: str = ""

    def __post_init__(self) -> None:
        if self.saved_inputs == "packed" and (reason := _unsupported_packed(self.wgrad.rhs)):
            raise ValueError(f"saved_inputs: packed needs a wgrad.rhs with codes; {reason}. Set it to exact.")
        for role, of_fprop in _MAY_BE_FORWARD.items():
            spec = self.operand(role)
            if spec.source == "forward" and (of_fprop is None or self.operand(of_fprop).rht):
                raise ValueError(_no_forward(role, of_fprop))
        if message := broken_rule(self):
            raise ValueError(message)
        if self.native and self.amax_reduction:
            raise ValueError(
                "amax_reduction: GEMMs on FP4 tensor cores do not support shards by features. Convert with "
                "backend='emulated'."
            )

    def operand(self, role: str) -> OperandSpec:
        """The spec of one operand. role: 'fprop.lhs' to 'wgrad.rhs'."""
        gemm, side = role.split(".")
        return getattr(getattr(self, gemm), side)

    @property
    def high_precision(self) -> bool:
        """Whether no GEMM is quantized."""
        return all(gemm.high_precision for gemm in (self.fprop, self.dgrad, self.wgrad))

    @property
    def corrects(self) -> bool:
        """Whether an operand has a correction, or channels are hot: unquantized tensors are multiplied."""
        return bool(self.hot_channels) or any(self.operand(role).correction for role in _MAY_BE_FORWARD)

    @property
    def keeps_weight(self) -> bool:
        """Whether Dgrad starts from Fprop's operand W: reuses its codes, or re-quantizes its values."""
        requantizes = self.dgrad.rhs.source == "forward" and self.fprop.rhs.block_format.quantized
        return self.shares_weight or requantizes

    @property
    def shares_weight(self) -> bool:
        """Whether Dgrad reuses Fprop's codes of W: one spec, square blocks, no transform."""
        spec = self.fprop.rhs
        same = spec == self.dgrad.rhs and spec.block_format.quantized
        return same and spec.square and not spec.rht and not spec.stochastic

    def to_text(self) -> str:
        """The table as text for `table_from_text`, which compiled graphs carry in place of an object."""
        return json.dumps(to_dict(self), sort_keys=True, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def table_from_text(text: str) -> GemmTable:
    """Inverse of GemmTable.to_text."""
    return build(GemmTable, json.loads(text), "GEMM table")


@functools.lru_cache(maxsize=1024)
def table_digest(text: str) -> str:
    """Hash of everything in a table's text that affects results bitwise, as `Recipe.digest`."""
    return _hash(_without_empty(_bitwise_settings(json.loads(text)), _NEWER))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBF16:
    """Linear layers that are not quantized. Raises ValueError for an invalid count or share.

    A number of blocks is a count, or a share of the model's blocks as text ('8/62'), rounded half up; a share
    of the last blocks keeps at least one. They are counted in each stack of blocks: encoder, decoder,
    tower.
    """

    #: shell-style patterns of module names; '*' also matches dots
    names: tuple[str, ...] = ("head", "*.head", "lm_head", "*.lm_head", "*embed*")
    first_blocks: int | str = 0
    last_blocks: int | str = 0

    def __post_init__(self) -> None:
        for label, value in (("first_blocks", self.first_blocks), ("last_blocks", self.last_blocks)):
            _share(value, f"KeepBF16.{label}")

    def count_first(self, blocks: int) -> int:
        """How many of the first blocks stay in BF16."""
        return min(blocks, _count(self.first_blocks, blocks, 0))

    def count_last(self, blocks: int) -> int:
        """How many of the last blocks stay in BF16."""
        return min(blocks, _count(self.last_blocks, blocks, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """A table that replaces the recipe's for the linear layers whose names match. The first match applies."""

    names: tuple[str, ...]
    table: GemmTable
    why: str = ""

    def __post_init__(self) -> None:
        if self.table.native:
            raise ValueError("native: a recipe cannot choose the GEMM backend. Set train.backend instead.")
        if self.table.amax_reduction:
            raise ValueError("amax_reduction: a recipe does not shard layers. Call shard_features instead.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines how a model's linear layers train."""

    name: str
    #: the publication; what the recipe takes from it; how it deviates from it
    source: str = ""
    taken: str = ""
    deviates: str = ""
    fprop: GemmSpec = field(default_factory=GemmSpec)
    dgrad: GemmSpec = field(default_factory=GemmSpec)
    wgrad: GemmSpec = field(default_factory=GemmSpec)
    keep_bf16: KeepBF16 = field(default_factory=KeepBF16)
    layers: tuple[LayerRule, ...] = ()
    #: as in GemmTable, for linear layers that no rule matches; does not affect results bitwise
    saved_inputs: Literal["exact", "packed"] = "exact"
    #: as in GemmTable, for linear layers that no rule matches, like the next three
    gradient_rows: Literal["any", "limited"] = "any"
    hot_channels: float = 0.0
    sums: Sums = "fp32"
    epilogue: Epilogue = "separate"
    #: whether evaluation and no_grad forwards are quantized as in training
    quantize_eval: bool = True
    #: groups of layers, by the ends of their names, whose W in Fprop is quantized with the largest of their
    #: amaxes if they are in one module: servers compute them as one matrix, with one global scale
    shared_weight_amax: tuple[tuple[str, ...], ...] = ()
    #: phases of the run in which some GEMMs have another precision; a shipped schedule by name in files
    schedule: tuple[PrecisionPhase, ...] = ()
    #: when weights that oscillate are set to the centre of their bin; None: never
    oscillation: Oscillation | None = None

    def __post_init__(self) -> None:
        tables = [self.table, *(rule.table for rule in self.layers)]  # building the first checks it
        for table in tables:
            if message := _wrong_sharing(self.shared_weight_amax, table.fprop.rhs):
                raise ValueError(f"shared_weight_amax: {message}")
        if self.schedule and not any(has_4_bits(table) for table in tables):
            raise ValueError(
                f"schedule: needs a recipe with 4-bit operands, which its phases replace for a time, got "
                f"{self.name!r}. Remove the schedule, or start from another recipe."
            )
        names = [phase.name for phase in self.schedule]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"schedule: phases must have different names, got {twice[0]!r} twice. Rename one."
            )

    @property
    def table(self) -> GemmTable:
        """The table of linear layers that no rule matches."""
        return GemmTable(
            fprop=self.fprop,
            dgrad=self.dgrad,
            wgrad=self.wgrad,
            saved_inputs=self.saved_inputs,
            gradient_rows=self.gradient_rows,
            hot_channels=self.hot_channels,
            sums=self.sums,
            epilogue=self.epilogue,
        )

    def for_run(
        self, steps: int, warmup: int = 0, decay: int = 0, data_starts: tuple[int, ...] = ()
    ) -> "Recipe":
        """The recipe with its schedule and oscillation in steps, for a run of `steps` steps.

        warmup, decay: steps of the learning rate's warmup and decay; data_starts: the first steps of the
        second and later phases of the data. Raises ValueError for phases that do not fit the run.
        """
        run = RunShape(steps, warmup, decay, data_starts)
        if self.oscillation is not None:
            self = replace(self, oscillation=self.oscillation.for_run(run))
        return replace(self, schedule=resolved(self.schedule, run)) if self.schedule else self

    @property
    def digest(self) -> str:
        """Hash of everything that affects results bitwise; excludes name, source and reasons."""
        content = _bitwise_settings(to_dict(self))
        content["schedule"] = [{**phase, "name": ""} for phase in content["schedule"]]
        content["layers"] = [
            {**rule, "why": "", "table": _bitwise_settings(rule["table"])} for rule in content["layers"]
        ]
        return _hash(_without_empty(content, _NEWER))


def has_4_bits(table: GemmTable) -> bool:
    """Whether any operand of a table has 4-bit elements."""
    elements = [table.operand(role).block_format.element for role in _MAY_BE_FORWARD]
    return any(element is not None and element.bits == 4 for element in elements)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _bitwise_settings(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings that affect results bitwise; one added later counts only where it is not the default, so
    that the hashes of older runs do not change.
    """
    added = {"gradient_rows": "any", "hot_channels": 0.0, "sums": "fp32", "epilogue": "separate"}
    return {k: v for k, v in tree.items() if k not in _NOT_BITWISE and (k not in added or v != added[k])}


def _without_empty(tree: Any, names: tuple[str, ...]) -> Any:
    """A tree of dicts and lists without the entries of these names that are empty."""
    if isinstance(tree, dict):
        kept = {key: value for key, value in tree.items() if value or key not in names}
        return {key: _without_empty(value, names) for key, value in kept.items()}
    return [_without_empty(part, names) for part in tree] if isinstance(tree, list) else tree


def _unsupported_packed(spec: OperandSpec) -> str | None:
    fmt = spec.block_format
    if not fmt.quantized or fmt.scale_in_epilogue or spec.outer_size is not None:
        return f"{spec.format} does not store codes under one scale per tensor"
    if spec.source == "forward" or spec.amax_policy != "current" or spec.adaptive != "none":
        return "it depends on the forward operand or on past steps"
    return None


def _wrong_sharing(groups: tuple[tuple[str, ...], ...], weight: OperandSpec) -> str | None:
    """The rule of shared amaxes that a recipe breaks, or None. docs/nvfp4.md, section 16."""
    names = [name for group in groups for name in group]
    if any(len(group) < 2 for group in groups) or len(set(names)) < len(names):
        return f"each group must have two or more names, and no name twice, got {groups}. Correct the names."
    if names and weight.tensor_scaled and weight.amax_policy not in ("delayed", "history"):
        return (
            "fprop.rhs.amax_policy must be delayed or history, because a layer knows the others' amaxes from "
            f"earlier steps only, got {weight.amax_policy!r}. Set it, with amax_headroom, on both operands W."
        )
    return None


def _no_forward(role: str, of_fprop: str | None) -> str:
    if of_fprop is None:
        reason = "only dgrad.rhs (W) and wgrad.rhs (X) have one"
    else:
        reason = f"{of_fprop} must have no transform; set {of_fprop}.rht to 0"
    return f"{role}.source: forward re-quantizes the forward operand; {reason}."


def _share(value: int | str, where: str) -> Fraction | int:
    share: Fraction | int = -1
    if isinstance(value, str):
        with suppress(ValueError, ZeroDivisionError):
            share = Fraction(value)
    elif type(value) is int:
        share = value
    if share < 0 or (isinstance(value, str) and share > 1):
        raise ValueError(f"{where}: must be a count or a share such as '8/62', got {value!r}. Set it to 0.")
    return share


def _count(value: int | str, blocks: int, least: int) -> int:
    share = _share(value, "KeepBF16")
    if isinstance(share, int):
        return share
    return max(least, int(share * blocks + Fraction(1, 2))) if share else 0
