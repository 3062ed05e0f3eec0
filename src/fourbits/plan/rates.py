"""The rates that a GPU should reach: shares of declared peaks, equal for all GPUs, or measured on one.

DECLARED was set once, between what tuned kernels and what long runs reach, and is not changed to make one
comparison better (docs/plan.md has the deviations that remain). FP8 and FP4 reach a smaller share than BF16,
as GEMMs of 8192^3 do on an H200: 1,288 of 1,979 TFLOP/s in FP8, 692 to 797 of 989 in BF16.
"""

from dataclasses import dataclass, replace

from fourbits.plan.gpus import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of a GPU's declared figures.

    gemm, gemm_low: of the dense peak of BF16, and of FP8 and FP4, by a GEMM of full tiles and long sums;
    attention, scan: of the BF16 peak, forward and backward, by FLOPs of model/counts.py; copy: of the
    memory's bandwidth; elementwise, quantize, quantize_stochastic: of copying the same bytes, by norms, sums,
    activations, loss and optimizer, and by quantizers; link, network, replicas: of the links' bandwidth, by
    collectives.
    """

    gemm: float = 0.68
    gemm_low: float = 0.58
    #: formats whose share was measured, in place of these
    gemm_of: tuple[tuple[str, float], ...] = ()
    attention: float = 0.45
    elementwise: float = 0.80
    scan: float = 0.10
    copy: float = 0.88
    quantize: float = 0.75
    quantize_stochastic: float = 0.55
    link: float = 0.67
    network: float = 0.50
    replicas: float = 0.90
    #: seconds of the host per linear layer, forward and backward, without CUDA graphs: BF16, quantized; per
    #: block for the rest; per gather of a group of blocks over ranks, and per sum of its gradients
    host_linear: float = 0.15e-3
    host_quantized: float = 0.40e-3
    host_block: float = 0.40e-3
    host_message: float = 1.0e-3
    #: seconds between two kernels that the host does not delay
    launch: float = 1.5e-6
    #: "declared", or the machine on which the shares were measured
    source: str = "declared"

    def gemm_share(self, name: str) -> float:
        """The share of a format's peak, or of BF16's for "emulated": 4-bit operands in BF16."""
        found = dict(self.gemm_of)
        if name == "emulated" and name not in found:
            name = "bf16"
        return found.get(name, self.gemm if name in ("bf16", "emulated") else self.gemm_low)


DECLARED = Rates()

#: rows and columns of an output tile, and the length of a sum that takes as long as a tile's start and end
TILE, RAMP = (128, 256), 128
#: the share of the SMs that a GEMM of fewer tiles than SMs keeps busy, by split-K
SPLIT = 0.8


def shape_efficiency(gpu: Gpu, m: int, n: int, k: int) -> float:
    """The share of a large GEMM's rate that an [m, k] x [k, n] one can have: tiles, waves, and short sums."""
    rows, columns = -(-m // TILE[0]), -(-n // TILE[1])
    used = m * n / (rows * TILE[0] * columns * TILE[1])
    waves = rows * columns / gpu.sms
    busy = SPLIT if waves < 1 else waves / -(-rows * columns // gpu.sms)
    return used * busy * k / (k + RAMP)


def gemm_seconds(
    gpu: Gpu,
    rates: Rates,
    sizes: tuple[int, int, int],
    formats: tuple[str, float, float],
) -> float:
    """The time of an [m, k] x [k, n] GEMM: the longer of its arithmetic and its bytes.

    formats: of the tensor cores, or "emulated"; bytes of an operand's element; bytes of an output's.
    """
    m, n, k = sizes
    name, read, write = formats
    peak = gpu.peak("bf16" if name == "emulated" else name)
    assert peak is not None, f"{gpu.name} has no tensor cores for {name}"
    flops = 2.0 * m * n * k / (peak * rates.gemm_share(name) * shape_efficiency(gpu, m, n, k))
    moved = (read * (m * k + n * k) + write * m * n) / copy_rate(gpu, rates)
    return max(flops, moved)


def copy_rate(gpu: Gpu, rates: Rates) -> float:
    """Bytes read plus written per second."""
    return gpu.bandwidth * rates.copy


def with_measured(rates: Rates, source: str, **measured: object) -> Rates:
    """The rates, some of them replaced by measured ones. source: where they were measured."""
    return replace(rates, source=source, **measured)  # pyright: ignore[reportArgumentType]
