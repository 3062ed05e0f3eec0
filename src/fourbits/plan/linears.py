"""The linear layers of a model by shape and precision, as `convert` decides them on the meta device."""

import functools
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from fourbits.formats.descriptors import BlockFormat
from fourbits.linear.convert import convert
from fourbits.linear.placement import table_for
from fourbits.linear.summary import ConversionSummary
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.plan.gpus import Gpu
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe, has_4_bits

#: the last part of a layer's name -> its kind, as in bench/steps, and how many layers read its input
_KINDS = {
    "in_proj": ("Mamba linears", 1),
    "out_proj": ("Mamba linears", 1),
    "q_proj": ("attention linears", 3),
    "k_proj": ("attention linears", 3),
    "v_proj": ("attention linears", 3),
    "o_proj": ("attention linears", 1),
    "gate_proj": ("FFN linears", 2),
    "up_proj": ("FFN linears", 2),
    "down_proj": ("FFN linears", 1),
    "head": ("head and loss", 1),
}
#: layers that are sharded by inputs
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
BF16_TABLE = GemmTable()


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Equal linear layers: `count` of [outputs, inputs], whose input `readers` layers share.

    table: its precision, BF16_TABLE if the recipe keeps it in BF16. Derived from it: quantized, whether any
    GEMM has a quantized operand; kept, whether its operands W last from the forward to the backward pass;
    packable, whether its weights can be gathered as 4-bit codes (wider ones are gathered in BF16:
    linear/packed_shards.py).
    """

    name: str
    kind: str
    outputs: int
    inputs: int
    count: int
    readers: int
    table: GemmTable
    quantized: bool = field(init=False)
    kept: bool = field(init=False)
    packable: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute these once, because a search reads them for every layout that it tries."""
        quantized = not self.table.high_precision
        kept = quantized and self.table.keeps_weight
        blocks = self.table.fprop.rhs.block_size is not None
        object.__setattr__(self, "quantized", quantized)
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "packable", kept and blocks and has_4_bits(self.table))

    @property
    def column_parallel(self) -> bool:
        """Whether ranks that share the layer have rows of its weight, that is, outputs.

        They have inputs where it writes to the residual stream (row parallel), and do not share the head
        (train/ranks/tensor_parallel.py).
        """
        return self.name not in (*_ROW_PARALLEL, "head")

    def on_rank(self, ranks: int) -> tuple[int, int]:
        """(outputs, inputs) of one of the ranks that share the layer."""
        if self.name == "head":
            return self.outputs, self.inputs
        if self.column_parallel:
            return max(1, self.outputs // ranks), self.inputs
        return self.outputs, max(1, self.inputs // ranks)

    @property
    def weights(self) -> int:
        """Weights of the whole group."""
        return self.outputs * self.inputs * self.count


def converted_on_meta(model: ModelConfig, recipe: Recipe) -> ConversionSummary:
    """The conversion of a model on the meta device, where any size needs no memory; without the schedule."""
    with torch.device("meta"):
        built = LanguageModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convert's warnings have rules in lint
        return convert(built, replace(recipe, schedule=()))


def linear_groups(model: ModelConfig, recipe: Recipe) -> list[LinearGroup]:
    """The groups in the order in which their first layers run; the head last."""
    return list(_groups(model, recipe))


@functools.lru_cache(maxsize=64)
def _groups(model: ModelConfig, recipe: Recipe) -> tuple[LinearGroup, ...]:
    counts: Counter[tuple[str, tuple[int, int], GemmTable]] = Counter()
    for row in converted_on_meta(model, recipe).rows:
        table = table_for(recipe, row.name)[0] if row.quantized else BF16_TABLE
        counts[row.name.rpartition(".")[2], row.shape, table] += 1
    found: list[LinearGroup] = []
    for (name, (outputs, inputs), table), count in counts.items():
        kind, readers = _KINDS[name]
        readers = 1 if name == "up_proj" and model.activation != "swiglu" else readers
        found.append(LinearGroup(name, kind, outputs, inputs, count, readers, table))
    return tuple(found)


def gemms_of(table: GemmTable) -> tuple[GemmSpec, GemmSpec, GemmSpec]:
    """Fprop, Dgrad, Wgrad."""
    return table.fprop, table.dgrad, table.wgrad


def unit_of(gemm: GemmSpec, gpu: Gpu) -> str:
    """The format of the tensor cores that a GEMM runs on: its own where the GPU has those, else bf16.

    fourbits itself does so for nvfp4 and fp8, and emulates the others in BF16 everywhere.
    """
    name = gemm.lhs.format
    if gemm.high_precision or name != gemm.rhs.format or gpu.peak(name) is None:
        return "bf16"
    if name == "mxfp8" and gpu.peak("mxfp4") is None:  # scales along K came with Blackwell
        return "bf16"
    return name


def stored_bytes(spec: OperandSpec) -> float:
    """Bytes of an element as codes with their scales; 2 if it stays in BF16."""
    fmt: BlockFormat = spec.block_format
    if not fmt.quantized or fmt.element is None:
        return 2.0
    size = spec.block_size
    along = size[1] if size is not None else 1 << 20
    return fmt.element.bits / 8 + (4.0 if fmt.scale == "fp32" else 1.0) / along
