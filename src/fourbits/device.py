"""What this machine can run, found out once, and which backend that allows.

A backend never changes the bits of codes or scales; it decides who computes them and at what speed:

- reference: plain torch, readable, the specification;
- emulated:  exact operands on BF16 GEMMs, quantized by fused Triton kernels on NVIDIA sm_80 and newer, by the
             compiled reference elsewhere. The numbers are 4-bit, the speed is not;
- native:    the FP4 tensor cores of Blackwell (sm_100 and newer), after a self-check on the user's own chip.
"""

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from enum import Enum

import torch

from fourbits.triton_version import installed_triton, why_no_triton

MIN_EMULATED = (8, 0)
MIN_NATIVE = (10, 0)


class Backend(Enum):
    """Who quantizes and multiplies."""

    REFERENCE = "reference"
    EMULATED = "emulated"
    NATIVE = "native"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Facts about the device that trains. `kind` is cpu, cuda, rocm, xpu or mps."""

    kind: str
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    torch_version: str
    triton_version: str | None
    cpp_compiler: str | None

    @property
    def torch_device(self) -> str:
        """The name torch gives this kind: PyTorch for AMD answers to cuda."""
        return "cuda" if self.kind == "rocm" else self.kind


def probe(kind: str | None = None, index: int | None = None) -> Device:
    """The facts of the best device present, or of one `kind` of device. Raises ValueError if it is absent.

    index: which of several cards; by default the current one.
    """
    present = _present()
    if kind is not None and kind not in present:
        raise ValueError(f"device {kind!r}: must be present on this machine, which has {', '.join(present)}.")
    kind = kind or present[0]
    name, capability, memory = _identify(kind, index)
    return Device(
        kind=kind,
        name=name,
        capability=capability,
        memory_bytes=memory,
        torch_version=torch.__version__,
        triton_version=installed_triton(),
        cpp_compiler=_cpp_compiler(),
    )


def facts_of(device: torch.device) -> Device:
    """The facts of a torch device."""
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return probe(kind, device.index)


def choose_backend(requested: str, device: Device, *, native_passed: bool = False) -> tuple[Backend, str]:
    """The backend that `requested` (auto, reference, emulated, native) means here, and why in one sentence.

    `native_passed`: the self-check of the native backend has passed on this chip; without it auto emulates.
    Raises ValueError for a backend that this device cannot run: nothing is replaced silently.
    """
    if requested == "auto":
        return _best(device, native_passed)
    if requested not in [backend.value for backend in Backend]:
        known = ", ".join(["auto", *(backend.value for backend in Backend)])
        raise ValueError(f"backend: must be one of {known}, got {requested!r}.")
    backend = Backend(requested)
    if backend is Backend.NATIVE:
        if blocker := native_blocker(device):
            raise ValueError(f"backend native: {blocker}. Use auto, which emulates the same bits here.")
        check = "the self-check passed" if native_passed else "a self-check runs before the first step"
        return backend, f"FP4 tensor cores of {_card(device)}, as requested; {check}"
    if backend is Backend.EMULATED and _too_old(device):
        raise ValueError(f"backend emulated: needs sm_80 or newer, this is {_card(device)}. Use reference.")
    return backend, f"as requested; {_quantizer(device) if backend is Backend.EMULATED else 'plain torch'}"


def native_blocker(device: Device) -> str | None:
    """Why this device has no native FP4, or None."""
    if device.kind != "cuda" or device.capability is None or device.capability < MIN_NATIVE:
        return f"FP4 tensor cores need NVIDIA sm_100 or newer (Blackwell), this is {_card(device)}"
    return triton_blocker(device)


def triton_blocker(device: Device) -> str | None:
    """Why the fused Triton kernels cannot run on this device, or None."""
    if device.kind != "cuda":
        return f"the fused kernels are for NVIDIA cards, this is {_card(device)}"
    if _too_old(device):
        return f"the fused kernels need sm_80 or newer, this is {_card(device)}"
    return why_no_triton(device.triton_version)


def peak_flops(device: Device, dtype: torch.dtype) -> float | None:
    """Dense peak FLOP/s of the tensor cores with FP32 accumulation; None where not known for certain."""
    for pattern, tera in PEAK_TERAFLOPS.items():
        if device.kind == "cuda" and re.fullmatch(f"NVIDIA (GeForce )?({pattern})", device.name):
            return tera[dtype] * 1e12 if dtype in tera else None
    return None


def _peaks(bf16: float, fp8: float | None = None, fp4: float | None = None) -> dict[torch.dtype, float]:
    rates = {torch.bfloat16: bf16, torch.float16: bf16, torch.float8_e4m3fn: fp8, torch.float4_e2m1fn_x2: fp4}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


# TFLOP/s without sparsity, for the full name of a card: a laptop, MIG or export variant matches nothing.
PEAK_TERAFLOPS: dict[str, dict[torch.dtype, float]] = {
    # NVIDIA A100 datasheet (2021)
    r"A100-SXM4?-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe": _peaks(312.0),
    # NVIDIA H100 datasheet (2023): SXM, PCIe, NVL; H200 datasheet (2024); GH200 datasheet (2024)
    r"H100 80GB HBM3|H200|GH200 (480GB|144G HBM3e)": _peaks(989.4, 1978.9),
    r"H100 PCIe": _peaks(756.5, 1513.0),
    r"H100 NVL|H200 NVL": _peaks(835.5, 1671.0),
    # NVIDIA L40S datasheet (2023)
    r"L40S": _peaks(362.05, 733.0),
    # HGX B200 and GB200 NVL72 datasheets (2024)
    r"B200": _peaks(2250.0, 4500.0, 9000.0),
    r"GB200": _peaks(2500.0, 5000.0, 10000.0),
    # NVIDIA architecture whitepapers, GeForce tables: GA102 (2020), Ada (2022), RTX Blackwell (2025)
    r"RTX 3090": _peaks(71.0),
    r"RTX 4090": _peaks(165.2, 330.3),
    r"RTX 5090": _peaks(209.5, 419.0, 1676.0),
}


def _best(device: Device, native_passed: bool) -> tuple[Backend, str]:
    if _too_old(device):
        return Backend.REFERENCE, f"plain torch: emulation needs sm_80 or newer, this is {_card(device)}"
    if native_blocker(device) is not None:
        return Backend.EMULATED, _quantizer(device)
    if native_passed:
        return Backend.NATIVE, f"FP4 tensor cores of {_card(device)}; the self-check passed"
    return (
        Backend.EMULATED,
        f"{_quantizer(device)}; its FP4 tensor cores have not passed the self-check",
    )


def _quantizer(device: Device) -> str:
    """How the emulated backend quantizes on this device."""
    blocker = triton_blocker(device)
    if blocker is None:
        return f"fused Triton kernels and BF16 tensor cores on exact operands ({_card(device)})"
    if device.kind == "cpu":
        if device.cpp_compiler is None:
            return "plain torch on the CPU, slower than compiled code: no C++ compiler found (install g++)"
        return "the compiled reference and exact operands on the CPU"
    if device.kind == "cuda":
        return f"plain torch quantizer, slow, and BF16 tensor cores on exact operands: {blocker}"
    return f"plain torch quantizer, same bits, slow, and BF16 GEMMs, untested on this hardware: {blocker}"


def _too_old(device: Device) -> bool:
    return device.kind == "cuda" and (device.capability is None or device.capability < MIN_EMULATED)


def _card(device: Device) -> str:
    architecture = f" (sm_{device.capability[0]}{device.capability[1]})" if device.capability else ""
    return f"{device.name}{architecture}"


def _present() -> list[str]:
    """Kinds of device on this machine, best first."""
    kinds = ["rocm" if torch.version.hip else "cuda"] if torch.cuda.is_available() else []
    kinds += ["xpu"] if torch.xpu.is_available() else []
    kinds += ["mps"] if torch.backends.mps.is_available() else []
    return [*kinds, "cpu"]


def _identify(kind: str, index: int | None) -> tuple[str, tuple[int, int] | None, int | None]:
    """Name, compute capability (NVIDIA only) and bytes of memory."""
    if kind in ("cuda", "rocm"):
        facts = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        return facts.name, (facts.major, facts.minor) if kind == "cuda" else None, facts.total_memory
    if kind == "xpu":
        facts = torch.xpu.get_device_properties(torch.xpu.current_device() if index is None else index)
        return facts.name, None, facts.total_memory
    if kind == "mps":
        return "Apple GPU", None, torch.mps.recommended_max_memory()
    return f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})", None, _machine_memory()


def _machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def _cpp_compiler() -> str | None:
    """Path of the compiler that torch.compile calls for CPU code: $CXX or the system's own."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which((os.environ.get("CXX") or default).split()[0])
