"""The shipped recipes as data. docs/nvfp4.md, section 14, has them in a table, with their deviations."""

from dataclasses import replace

from fourbits.quant.operand import OperandSpec
from fourbits.recipe.oscillation import Oscillation
from fourbits.recipe.recipe import GemmSpec, GemmTable, KeepBF16, LayerRule, Recipe

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


_UE5M3 = OperandSpec(format="nvfp4-ue5m3-global", amax_policy="interval", amax_interval=50)
_UE5M3_SR = replace(_UE5M3, rounding="sr32")
_UE5M3_BLOCK_2D = replace(_UE5M3, block=(16, 16), source="bf16")

_CENTRED = replace(_ROW, correction="token-mean")
_CENTRED_SR = replace(_ROW_SR, correction="token-mean")

_DOUBLE = OperandSpec(format="nvfp4-double")
_DOUBLE_SR = replace(_DOUBLE, rounding="sr", rht=16, rht_signs="per-call")
_DOUBLE_BACKWARD = GemmSpec(lhs=_DOUBLE_SR, rhs=replace(_DOUBLE_SR, source="forward"))

#: in the order in which they are listed
SHIPPED = (
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
        name="fourbits",
        source="this project (docs/results.md); MS-EDEN of arXiv:2601.22813",
        taken="quartet2, but in Fprop X has error feedback over up to 2,048 columns (nvfp4.md, section 25) "
        "and the scales of W are searched by MSE (section 7.5), and Wgrad quantizes X itself",
        deviates="of quartet2, what quartet2 itself changes",
        fprop=GemmSpec(
            lhs=replace(_ROW, error_feedback=2048), rhs=replace(_ROW, source="bf16", scale_rule="search-mse")
        ),
        dgrad=_QUARTET2_BACKWARD,
        wgrad=GemmSpec(lhs=_EDEN, rhs=_EDEN),
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
    Recipe(
        name="ue5m3",
        source="arXiv:2609.02846",
        taken="UE5M3 block scales, which leave room above the amax (137 times), so that it is measured every "
        "50 steps and kept in between; SR on dY, no RHT, no BF16 blocks",
        deviates="the amax maps to the scale 448 everywhere (theirs: 2048 for dY in Wgrad of four layers); "
        "in a step that measures, each micro-batch uses its own amax; a resumed run continues the interval "
        "instead of starting one; 24 random bits per element instead of 8, both without bias; blocks that "
        "underflow have the scale 0 instead of 1, with the same values, all zero",
        fprop=GemmSpec(lhs=_UE5M3, rhs=_UE5M3_BLOCK_2D),
        dgrad=GemmSpec(lhs=_UE5M3_SR, rhs=_UE5M3_BLOCK_2D),
        wgrad=GemmSpec(lhs=_UE5M3_SR, rhs=_UE5M3),
    ),
    Recipe(
        name="fp4-all-the-way",
        source="arXiv:2505.19115",
        taken="1x16 blocks everywhere; RNE in the forward pass and for W in Dgrad, SR for dY and for X in "
        "Wgrad (the GEMM that the paper calls the update); no RHT, no BF16 blocks",
        deviates="a scale per tensor above the block scales, as NVFP4 has, which the paper does not mention; "
        "without its last phase, a backward pass in BF16: fp4-all-the-way+late-backward has one, which "
        "begins with the decay instead of where gradients fall below sqrt(3) times their noise",
        fprop=_NAIVE_WEIGHT,
        dgrad=replace(_NAIVE_WEIGHT, lhs=_ROW_SR),
        wgrad=GemmSpec(lhs=_ROW_SR, rhs=_ROW_SR),
    ),
    Recipe(
        name="averis",
        source="arXiv:2603.10444",
        taken="the mean over tokens is removed from X and dY before quantizing, and its products are added "
        "back in FP32; no RHT, no BF16 blocks",
        deviates="the abstract, all that was read, does not say what the rest of the recipe is: here 16x16 "
        "weights and SR on dY, as in nvfp4; the mean is that of a micro-batch of a rank",
        fprop=GemmSpec(lhs=_CENTRED, rhs=_BLOCK_2D),
        dgrad=GemmSpec(lhs=_CENTRED_SR, rhs=_BLOCK_2D),
        wgrad=GemmSpec(lhs=_CENTRED_SR, rhs=_CENTRED),
    ),
    Recipe(
        name="tetrajet2",
        source="arXiv:2510.27527",
        taken="an FP32 scale per 1x128 above the block scales, 1x16 weights, W and X re-quantized from the "
        "forward operands, RHT 16 and SR on all four backward operands, OsciReset; no BF16 blocks",
        deviates="without OutControl (a tenth of the channels in MXFP8); OsciReset begins at 60 % of the "
        "run, every 200 steps (theirs: at 59 to 69 %, every 200 to 400), and resets right after the last "
        "step of a window; W is rounded to BF16 before it is quantized; signs drawn per layer, GEMM and "
        "optimizer step instead of one draw per call",
        fprop=GemmSpec(lhs=_DOUBLE, rhs=replace(_DOUBLE, source="bf16")),
        dgrad=_DOUBLE_BACKWARD,
        wgrad=_DOUBLE_BACKWARD,
        oscillation=Oscillation(window=50, period=200, ratio=8.0, start=0.6),
    ),
    Recipe(
        name="alto",
        source="AMD's draft report of ALTO on NVFP4 (github.com/AMD-AGI/ALTO, v0.1)",
        taken="16x16 weights, RHT 32 on Wgrad, SR on gradients, no BF16 blocks; OsciReset with ratio 4, "
        "windows of 200 steps without a pause",
        deviates="OsciReset begins at their share of the run (step 2,000 of 16,128); blocks that underflow "
        "have the scale 0 instead of the smallest normal one; signs of the transform are fixed; their "
        "measured gain of OsciReset is with UE5M3 scales",
        fprop=GemmSpec(lhs=_ROW, rhs=_BLOCK_2D),
        dgrad=_NVFP4_DGRAD,
        wgrad=GemmSpec(lhs=replace(_ROW_SR, rht=32), rhs=replace(_ROW, rht=32)),
        oscillation=Oscillation(window=200, period=200, ratio=4.0, start="2000/16128"),
    ),
    Recipe(
        name="chon",
        source="arXiv:2602.02047",
        taken="the quantization error of hot channels, the largest of X, is added back: on top of nvfp4 "
        "without BF16 blocks",
        deviates="the abstract, all that was read, gives no share of channels and no rule to choose them: "
        "here a sixteenth of them, by their largest magnitude in each call, and of X only; Dgrad and Wgrad "
        "compute these channels from unquantized tensors; without the protection of operations behind QK",
        fprop=GemmSpec(lhs=_ROW, rhs=_BLOCK_2D),
        dgrad=_NVFP4_DGRAD,
        wgrad=_NVFP4_WGRAD,
        hot_channels=0.0625,
    ),
)
