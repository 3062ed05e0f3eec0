"""Speeds and memory that were measured, by others and by this project, and what the plan predicts for them.

One set of declared rates predicts all of them. `why` explains a deviation, and marks a guess as one.
docs/plan.md has the table.
"""

from dataclasses import dataclass, replace

from fourbits.model.config import ModelConfig
from fourbits.model.loss import GPU_CHUNK_LOGITS
from fourbits.model.presets import MODEL_PRESETS
from fourbits.plan.gpus import GPUS
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.linears import linear_groups
from fourbits.plan.machine import Machine
from fourbits.plan.memory import memory_of
from fourbits.plan.rates import DECLARED, Rates
from fourbits.plan.software import FOURBITS, MEGATRON, TORCHTITAN, TORCHTITAN_KEPT, Software
from fourbits.plan.step import step_of
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import KeepBF16, Recipe
from fourbits.train.parallel import ParallelConfig

GIB = 2**30
LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    d_model=4096,
    pattern="T" * 32,
    d_ffn=14336,
    activation="swiglu",
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measured configuration. tokens_per_second: of one GPU; gib: its peak, None where not published."""

    name: str
    model: ModelConfig
    recipe: Recipe
    gpu: str
    layout: ParallelLayout
    seq_len: int
    software: Software
    tokens_per_second: float
    gib: float | None
    source: str
    why: str
    #: logits per chunk of its loss
    loss_chunk: int = GPU_CHUNK_LOGITS


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the plan predicts for a case; deviations are predicted / measured - 1."""

    case: Case
    tokens_per_second: float
    gib: float

    @property
    def speed_deviation(self) -> float:
        """Deviation of the predicted tokens/s."""
        return self.tokens_per_second / self.case.tokens_per_second - 1

    @property
    def memory_deviation(self) -> float | None:
        """Deviation of the predicted peak; None where it was not published."""
        return None if self.case.gib is None else self.gib / self.case.gib - 1


def predict(case: Case, rates: Rates = DECLARED) -> Prediction:
    """Predict one case."""
    groups = linear_groups(case.model, case.recipe)
    machine = Machine(GPUS[case.gpu], rates, case.software)
    step = step_of(case.model, groups, case.seq_len, case.layout, machine)
    packs = case.recipe.saved_inputs == "packed"
    args = (case.seq_len, case.layout, machine.gpu, case.software)
    memory = memory_of(case.model, groups, packs, *args, case.loss_chunk)
    tokens = case.layout.samples * case.seq_len / step.seconds / case.layout.gpus
    return Prediction(case, tokens, memory.total / GIB)


def _all_blocks(name: str, last: int = 0) -> Recipe:
    """A recipe with the last blocks in BF16, and no others."""
    return replace(get_recipe(name), keep_bf16=KeepBF16(last_blocks=last))


def _without_transform(recipe: Recipe) -> Recipe:
    plain = replace(recipe.wgrad, lhs=replace(recipe.wgrad.lhs, rht=0), rhs=replace(recipe.wgrad.rhs, rht=0))
    return replace(recipe, wgrad=plain)


_MFU = "github.com/MrHuff/mfu-fp4-training, 32 GPUs, batch 512, medians of steps 40 to 100"
_UE = "github.com/MrHuff/ue5m3-fp4, one GPU, batch 1"
_BRIDGE = "Megatron Bridge, performance summary 25.11, 8 GPUs, batch 128"
_OURS = "benchmarks.md"
_EAGER = (
    "0.12 to 0.17 s per micro-batch in both precisions are unexplained. Whether NVLink connects its eight "
    "nodes is not published: over a network of 50 GB/s per GPU the three would be within 16 %"
)


def _llama(
    name: str, recipe: Recipe, layout: ParallelLayout, measured: tuple[float, float], software: Software
) -> Case:
    """measured: tokens/s and GiB."""
    return Case(
        name=name,
        model=LLAMA_8B,
        recipe=recipe,
        gpu="gb200",
        layout=layout,
        seq_len=8192,
        software=software,
        tokens_per_second=measured[0],
        gib=measured[1],
        source=_MFU,
        why=_EAGER,
        loss_chunk=_WHOLE,
    )


def _megatron(gpu: str, speed: float, layout: ParallelLayout, why: str) -> Case:
    return Case(
        name="Llama 8B, Megatron",
        model=LLAMA_8B,
        recipe=_all_blocks("fp8"),
        gpu=gpu,
        layout=layout,
        seq_len=8192,
        software=MEGATRON,
        tokens_per_second=speed,
        gib=None,
        source=_BRIDGE,
        why=why,
    )


def _nemotron(name: str, recipe: Recipe, speed: float) -> Case:
    return Case(
        name=name,
        model=MODEL_PRESETS["hybrid-8b"],
        recipe=recipe,
        gpu="gb200",
        layout=ParallelLayout(micro_batch=1, accumulation=1),
        seq_len=1024,
        software=TORCHTITAN,
        tokens_per_second=speed,
        gib=None,
        source=_UE,
        why="1,024 tokens take 0.3 s, probably the host's: 2 ms per layer of TransformerEngine, where we "
        "assume 0.4",
    )


def _own(
    preset: str,
    recipe: str,
    gpu: str,
    batch: tuple[int, int],
    measured: tuple[float, float | None],
    why: str = "",
    vocabulary: int | None = None,
    loss_chunk: int = GPU_CHUNK_LOGITS,
) -> Case:
    """batch: sequences of a micro-batch, of this many tokens; two micro-batches per step."""
    model = MODEL_PRESETS[preset]
    name, _, packed = recipe.partition(":")
    found = get_recipe(name)
    return Case(
        name=preset,
        model=replace(model, vocab_size=vocabulary or model.vocab_size),
        recipe=replace(found, saved_inputs="packed") if packed else found,
        gpu=gpu,
        layout=ParallelLayout(micro_batch=batch[0], accumulation=2),
        seq_len=batch[1],
        software=FOURBITS,
        tokens_per_second=measured[0],
        gib=measured[1],
        source=_OURS,
        why=why,
        loss_chunk=loss_chunk,
    )


def _several(
    preset: str, recipe: str, layout: ParallelLayout, seconds: float, gib: float | None = None, why: str = ""
) -> Case:
    """A case on two GPUs, measured by `bench ranks`. seconds: of a step."""
    one = _own(preset, recipe, "h200", (layout.micro_batch, 8192), (0.0, gib), why)
    shared = " that share layers" if layout.tensor > 1 else ""
    several = "es" if layout.accumulation > 1 else ""
    return replace(
        one,
        name=f"{preset}, 2 GPUs{shared}, {layout.accumulation} micro-batch{several}",
        layout=replace(layout, gather_weights=ParallelConfig().gather_weights),
        tokens_per_second=layout.samples * 8192 / seconds / layout.gpus,
    )


_LARGE = "GEMMs of 4-bit operands draw less power and run faster than we assume"
_SMALL = "short sequences: attention and rotations are bound by launches and strides, which are not modelled"
_WHOLE = 1 << 60  #: a loss of all logits at once
_CACHED = "tensors of 42 MB, which probably stay in the L2 cache in part"
_ENDS = "per step 19 ms for embedding and head, where 6 are planned, and 14 ms per micro-batch besides"
_UNKNOWN = "unexplained; in nvfp4, whose blocks are gathered in 39 % of the bytes, it is 3 %"
_MESSAGES = "the host launches four exchanges per mixer, whose time is not planned"
_MAXIMA = f"{_MESSAGES}, and a sum of maxima for each quantized tensor in parts"
_FP8 = "our FP8 GEMMs promote sums every 128 products"
_FSDP32 = ParallelLayout(shard=32, micro_batch=2, accumulation=8, recomputed=1 / 8)
_HSDP = ParallelLayout(replicate=4, shard=8, micro_batch=2, accumulation=8, recomputed=1 / 32)
_DDP8 = ParallelLayout(replicate=8, micro_batch=2, accumulation=8)
_FSDP8 = ParallelLayout(shard=8, micro_batch=1, accumulation=16)
_TWO = ParallelLayout(shard=2, micro_batch=2, accumulation=2)
_TWO_8B = ParallelLayout(shard=2, micro_batch=1, accumulation=1, recomputed=1.0)
_TWO_SHARING = ParallelLayout(tensor=2, micro_batch=2, accumulation=2)

CASES = (
    _llama("Llama 8B, torchtitan", get_recipe("bf16"), _FSDP32, (18_812, 101.19), TORCHTITAN),
    _llama("Llama 8B, TransformerEngine", _all_blocks("nvfp4"), _HSDP, (27_622, 125.80), TORCHTITAN_KEPT),
    _llama(
        "Llama 8B, TransformerEngine, 4 BF16 blocks",
        _all_blocks("nvfp4", last=4),
        _HSDP,
        (27_077.5, 126.03),
        TORCHTITAN_KEPT,
    ),
    _nemotron("Nemotron-H 8B, TransformerEngine", _all_blocks("nvfp4", last=8), 3_212),
    _nemotron("Nemotron-H 8B, all blocks, no transform", _without_transform(_all_blocks("nvfp4")), 3_894),
    _megatron("h100", 14_451, _FSDP8, "one share of the FP8 peak for every GPU"),
    _megatron("b200", 30_624, _DDP8, "the same"),
    _megatron("gb200", 31_508, _DDP8, "the same"),
    _megatron(
        "gb300", 37_556, _DDP8, "the same; a GB300 probably holds higher clocks than a GB200 at equal peaks"
    ),
    _own("transformer-1.2b", "bf16", "h200", (4, 8192), (64_330, 56.9), "GEMMs reach 0.74 of the peak there"),
    _own("transformer-1.2b", "nvfp4", "h200", (4, 8192), (61_108, 60.0), _LARGE),
    _own("transformer-1.2b", "nvfp4:packed", "h200", (4, 8192), (59_880, 51.4), _LARGE),
    _own("transformer-1.2b", "bf16", "h200", (8, 4096), (74_449, 56.9), "as above"),
    _own("transformer-1.2b", "nvfp4", "h200", (8, 4096), (70_215, 60.0), _LARGE),
    _own("transformer-1.2b", "nvfp4:packed", "h200", (8, 4096), (68_611, 51.4), _LARGE),
    _own("hybrid-1.2b", "bf16", "h200", (2, 8192), (74_199, 42.4), "as above"),
    _own("hybrid-1.2b", "nvfp4", "h200", (2, 8192), (70_959, 43.7), _LARGE),
    _own("hybrid-1.2b", "nvfp4:packed", "h200", (2, 8192), (69_234, 39.7), _LARGE),
    _own("hybrid-1.2b", "bf16", "h200", (4, 4096), (75_231, 42.4), "as above"),
    _own("hybrid-1.2b", "nvfp4", "h200", (4, 4096), (71_539, 43.7), _LARGE),
    _several("transformer-1.2b", "bf16", replace(_TWO, micro_batch=4), 1.031 / 0.932),
    _several("transformer-1.2b", "nvfp4", replace(_TWO, micro_batch=4), 1.141, 54.0),
    _several("hybrid-1.2b", "bf16", _TWO, 0.441 / 0.893, why=_ENDS),
    _several("hybrid-1.2b", "nvfp4", _TWO, 0.475 / 0.899, 37.5, _ENDS),
    _several("hybrid-1.2b", "nvfp4", replace(_TWO, accumulation=8), 1.826 / 0.933),
    _several("hybrid-8b", "bf16", _TWO_8B, 1.07, why=_UNKNOWN),
    _several("hybrid-8b", "nvfp4", _TWO_8B, 1.04, 68.4),
    _several("hybrid-8b", "nvfp4", replace(_TWO_8B, accumulation=2, accumulate="sharded"), 2.03, 83.5),
    _several("hybrid-1.2b", "bf16", _TWO_SHARING, 0.3113, 26.5, _MESSAGES),
    _several("hybrid-1.2b", "nvfp4", _TWO_SHARING, 0.4449, 29.9, _MAXIMA),
    _own("30m", "bf16", "h100", (64, 512), (1_246_899, 5.00), _SMALL, 8192, 1 << 26),
    _own("30m", "nvfp4", "h100", (64, 512), (947_502, 5.24), _SMALL, 8192, 1 << 26),
    _own("30m", "bf16", "h200", (64, 512), (65_536 / 0.0494, None), _CACHED),
    _own("30m", "nvfp4", "h200", (64, 512), (65_536 / 0.0665, None), _CACHED),
    _own("30m", "mxfp4", "h200", (64, 512), (65_536 / 0.0623, None), _CACHED),
    _own("30m", "fp8", "h200", (64, 512), (65_536 / 0.0548, None), f"{_CACHED}; {_FP8}"),
)
