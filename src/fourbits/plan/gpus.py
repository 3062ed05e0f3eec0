"""GPUs as data sheets declare them. Nothing here was measured by this project.

Peaks of the tensor cores are those of `device.PEAK_TERAFLOPS`: dense, with FP32 accumulation.
"""

import functools
from dataclasses import dataclass

import torch

from fourbits.device import Device, peak_flops
from fourbits.settings import nearest

GIGA, TERA = 1e9, 1e12
#: a format of GEMM operands -> the dtype whose peak its tensor cores have
PEAK_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "mxfp8": torch.float8_e4m3fn,
    "nvfp4": torch.float4_e2m1fn_x2,
    "mxfp4": torch.float4_e2m1fn_x2,
}
#: GPUs of a run, at most: ten times the largest clusters of today
MAX_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, by its data sheet.

    device: its name as the driver reports it; memory: bytes; bandwidth: of its memory, bytes read plus
    written per second; link, network: bytes per second that it sends to GPUs of its domain (NVLink or PCIe),
    and of other domains; domain: GPUs that the link connects; sms: streaming multiprocessors; watts:
    of the GPU at most; system_watts: of a server or rack at most, per GPU.
    """

    name: str
    device: str
    memory: float
    bandwidth: float
    link: float
    network: float
    domain: int
    sms: int
    watts: float
    system_watts: float
    source: str

    def peak(self, name: str) -> float | None:
        """Dense FLOP/s for operands of a format; None if its tensor cores do not support it."""
        return _peak(self.device, name)

    @property
    def bf16_peak(self) -> float:
        """Dense BF16 FLOP/s, which every GPU of the table has."""
        peak = self.peak("bf16")
        assert peak is not None, f"{self.device} is in the table of peaks"
        return peak


@functools.cache
def _peak(device: str, name: str) -> float | None:
    """`device.peak_flops` of a GPU by its name, for a format; cached, as a search calls it very often."""
    described = Device(
        kind="cuda",
        name=device,
        capability=None,
        memory_bytes=None,
        torch_version="",
        triton_version=None,
        cpp_compiler=None,
    )
    dtype = PEAK_DTYPES.get(name)
    return None if dtype is None else peak_flops(described, dtype)


def _gpu(
    name: str,
    device: str,
    gigabytes: float,
    terabytes_per_second: float,
    links: tuple[float, float, int],
    sms: int,
    watts: tuple[float, float],
    source: str,
) -> Gpu:
    """links: GB/s per direction of link and network, and the domain; watts: of the GPU, of the system."""
    return Gpu(
        name=name,
        device=f"NVIDIA {device}",
        memory=gigabytes * GIGA,
        bandwidth=terabytes_per_second * TERA,
        link=links[0] * GIGA,
        network=links[1] * GIGA,
        domain=links[2],
        sms=sms,
        watts=watts[0],
        system_watts=watts[1],
        source=source,
    )


_DGX = "; network: one adapter per GPU; power:"
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            *("a100", "A100-SXM4-80GB", 80, 2.039, (300, 25, 8), 108, (400, 812)),
            f"NVIDIA A100 datasheet (2021){_DGX} a DGX A100 has 6.5 kW",
        ),
        _gpu(
            *("h100", "H100 80GB HBM3", 80, 3.35, (450, 50, 8), 132, (700, 1275)),
            f"NVIDIA H100 datasheet (2023), SXM{_DGX} a DGX H100 has 10.2 kW",
        ),
        _gpu(
            *("h200", "H200", 141, 4.8, (450, 50, 8), 132, (700, 1275)),
            f"NVIDIA H200 datasheet (2024), SXM{_DGX} a DGX H200 has 10.2 kW",
        ),
        _gpu(
            *("b200", "B200", 180, 7.7, (900, 50, 8), 148, (1000, 1788)),
            f"HGX B200 datasheet (2024){_DGX} a DGX B200 has 14.3 kW",
        ),
        _gpu(
            *("gb200", "GB200", 186, 8.0, (900, 50, 72), 148, (1200, 1833)),
            f"GB200 NVL72 datasheet (2024){_DGX} a rack has 132 kW",
        ),
        _gpu(
            *("b300", "B300", 270, 7.7, (900, 100, 8), 148, (1100, 1750)),
            f"HGX B300 datasheet (2025){_DGX} a DGX B300 has 14 kW",
        ),
        _gpu(
            *("gb300", "GB300", 279, 8.0, (900, 100, 72), 148, (1400, 1972)),
            f"GB300 NVL72 datasheet (2025){_DGX} a rack has 142 kW",
        ),
        _gpu(
            *("rtx5090", "GeForce RTX 5090", 32, 1.792, (64, 12.5, 8), 170, (575, 750)),
            "RTX Blackwell whitepaper (2025); link: PCIe 5.0; network and system assumed",
        ),
        _gpu(
            *("rtxpro6000", "RTX PRO 6000 Blackwell Server Edition", 96, 1.597),
            *((64, 50, 8), 188, (600, 900)),
            "RTX PRO 6000 Blackwell datasheet (2025); link: PCIe 5.0; network and system assumed",
        ),
    )
}


def require_count(name: str, value: int) -> None:
    """Raises ValueError unless a number of GPUs or ranks is one that a run can have. name: for errors."""
    if not 1 <= value <= MAX_GPUS:
        raise ValueError(
            f"{name}: must be from 1 to {MAX_GPUS:,}, got {value}. Pass the number of the run, such as 64."
        )


def find_gpu(name: str) -> Gpu:
    """A GPU by name, in any case, with or without spaces and dashes. Raises ValueError for another."""
    key = "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")
    if key not in GPUS:
        raise ValueError(
            f"gpu: must be one of {', '.join(GPUS)}, got {name!r}.{nearest(name, list(GPUS))} Pass the one "
            "that is most like yours."
        )
    return GPUS[key]
