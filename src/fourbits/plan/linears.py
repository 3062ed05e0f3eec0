"""The linear layers of a model by shape and precision, as `convert` decides them on the meta device."""

import functools
import warnings
from collections import Counter
from dataclasses import dataclass, replace

import torch

from fourbits.formats.descriptors import BlockFormat
from fourbits.linear.convert import convert
from fourbits.linear.placement import table_for
from fourbits.linear.summary import ConversionSummary
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.plan.gpus import Gpu
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe

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
BF16_TABLE = GemmTable()


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Equal linear layers: `count` of [outputs, inputs], whose input `readers` layers share.

    table: its precision, BF16_TABLE if the recipe keeps it in BF16.
    """

    name: str
    kind: str
    outputs: int
    inputs: int
    count: int
    readers: int
    table: GemmTable

    @property
    def quantized(self) -> bool:
        """Whether any GEMM has a quantized operand."""
        return not all(gemm.high_precision for gemm in gemms_of(self.table))

    @property
    def weights(self) -> int:
        """Weights of the whole group."""
        return self.outputs * self.inputs * self.count


def converted_on_meta(model: ModelConfig, recipe: Recipe) -> ConversionSummary:
    """The conversion of a model on the meta device, where any size needs no memory; without the schedule."""
    with torch.device("meta"):
        built = LanguageModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convert: what it warns of has a rule of lint
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

    fourbits itself runs nvfp4 and fp8 so, and emulates the others in BF16 everywhere.
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
