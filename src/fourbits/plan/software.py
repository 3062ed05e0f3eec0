"""What a training program does around its GEMMs, as far as time and memory depend on it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How a program runs a step.

    fused: elementwise operations between linear layers are fused into few passes; shares_inputs: layers that
    read the same tensor share its quantized operands; one_read: both operands of a tensor come from one read;
    weight_bytes: of a weight as it is gathered over ranks and read by the quantizer; saves_weights: whether
    quantized weights are kept from the forward to the backward pass; regathers: whether the backward pass
    gathers weights again; graphs: whether one GPU replays CUDA graphs, without the host; packs_gathers:
    whether weights are gathered quantized where they can be; sums_once: whether gradients are summed over
    ranks after the last micro-batch, which takes all of them in FP32 until then, or after each one;
    saves_operands: whether a quantized layer saves its own operand X of Wgrad as codes, whatever the recipe.
    """

    name: str
    fused: bool = True
    shares_inputs: bool = True
    one_read: bool = True
    weight_bytes: int = 4
    saves_weights: bool = True
    regathers: bool = True
    graphs: bool = True
    packs_gathers: bool = False
    sums_once: bool = True
    saves_operands: bool = False


#: the trainer of this project
FOURBITS = Software(name="fourbits", packs_gathers=True)
#: torchtitan with its layers run one operation after the other, linear layers of TransformerEngine. Its
#: train_step leaves gradient synchronization on in every micro-batch (torchtitan/train.py)
TORCHTITAN = Software(
    name="torchtitan with TransformerEngine, only the loss compiled",
    fused=False,
    shares_inputs=False,
    one_read=False,
    weight_bytes=2,
    graphs=False,
    sums_once=False,
    saves_operands=True,
)
#: the same with weights gathered once per micro-batch and kept until its backward pass ends
TORCHTITAN_KEPT = replace(
    TORCHTITAN, name="torchtitan with TransformerEngine, weights kept gathered", regathers=False
)
#: Megatron-LM as its published benchmarks run it: fused kernels, CUDA graphs, FP8 by tensor
MEGATRON = Software(
    name="Megatron-LM with TransformerEngine", shares_inputs=True, one_read=True, weight_bytes=2
)
