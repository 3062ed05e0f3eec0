"""This machine's devices, and the backend that they allow.

A backend never changes the bits of codes or scales. It selects the implementation, and with it the speed:

- reference: plain PyTorch, readable, the specification;
- emulated:  BF16 GEMMs on dequantized operands (exact in BF16). Fused Triton kernels quantize on NVIDIA sm_80
             and newer, the compiled reference elsewhere. The numbers are 4-bit, the speed is not;
- native:    the FP4 tensor cores of Blackwell (sm_100 and newer), after a self-check on the chip in use.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum

import torch

from fourbits.triton_version import installed_triton, unsupported_version

MIN_EMULATED = (8, 0)
MIN_NATIVE = (10, 0)


class Backend(Enum):
    """The implementation that quantizes and runs the GEMMs."""

    REFERENCE = "reference"
    EMULATED = "emulated"
    NATIVE = "native"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device and the software that drives it. `kind` is cpu, cuda, rocm, xpu or mps."""

    kind: str
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    torch_version: str
    triton_version: str | None
    cpp_compiler: str | None

    @property
    def torch_device(self) -> str:
        """PyTorch's name for this kind: its ROCm build calls AMD GPUs cuda."""
        return "cuda" if self.kind == "rocm" else self.kind


def probe(device: str | torch.device | None = None) -> Device:
    """Describe a device: a kind, a torch.device, or by default the best one present.

    Where there are several GPUs, a torch.device with an index selects one; otherwise the current one is
    described. Raises ValueError if the device is absent.
    """
    kind, index = (device.type, device.index) if isinstance(device, torch.device) else (device, None)
    if isinstance(device, torch.device) and kind == "cuda" and torch.version.hip:
        kind = "rocm"
    present = _present()
    if kind is not None and kind not in present:
        raise ValueError(
            f"device {kind!r}: must be present on this machine, which has {', '.join(present)}. Choose one "
            "of these, or omit it for the best."
        )
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


def choose_backend(requested: str, device: Device, *, native_passed: bool = False) -> tuple[Backend, str]:
    """Resolve `requested` (auto, reference, emulated, native) to a backend, and say why in one sentence.

    `native_passed`: the native backend's self-check has passed on this chip; without it, auto emulates.
    Raises ValueError for a backend that this device cannot run; there is no silent fallback.
    """
    if requested == "auto":
        return _best(device, native_passed)
    if requested not in [backend.value for backend in Backend]:
        known = ", ".join(["auto", *(backend.value for backend in Backend)])
        raise ValueError(
            f"backend: must be one of {known}, got {requested!r}. Pass auto to let fourbits choose."
        )
    backend = Backend(requested)
    if backend is Backend.NATIVE:
        if reason := unsupported_fp4(device):
            raise ValueError(f"backend native: {reason}. Use auto, which emulates the same bits here.")
        check = "the self-check passed" if native_passed else "a self-check runs before the first step"
        return backend, f"FP4 tensor cores of {_full_name(device)}, as requested; {check}"
    if backend is Backend.EMULATED and _too_old(device):
        raise ValueError(
            f"backend emulated: needs sm_80 or newer, this is {_full_name(device)}. Use reference."
        )
    return backend, f"as requested; {_quantizer(device) if backend is Backend.EMULATED else 'plain PyTorch'}"


def unsupported_fp4(device: Device) -> str | None:
    """Why this device cannot run the native backend, or None."""
    if device.kind != "cuda" or device.capability is None or device.capability < MIN_NATIVE:
        return f"FP4 tensor cores need NVIDIA sm_100 or newer (Blackwell), this is {_full_name(device)}"
    return unsupported_triton(device)


def unsupported_triton(device: Device) -> str | None:
    """Why this device cannot run Triton kernels, or None."""
    if device.kind != "cuda":
        return f"Triton kernels need an NVIDIA GPU, this is {_full_name(device)}"
    if _too_old(device):
        return f"Triton kernels need sm_80 or newer, this is {_full_name(device)}"
    return unsupported_version(device.triton_version)


def peak_flops(device: Device, dtype: torch.dtype) -> float | None:
    """Dense peak FLOP/s of the tensor cores with FP32 accumulation; None if not known for certain."""
    for pattern, tera in PEAK_TERAFLOPS.items():
        if device.kind == "cuda" and re.fullmatch(f"NVIDIA (GeForce )?({pattern})", device.name):
            return tera[dtype] * 1e12 if dtype in tera else None
    return None


def _peaks(bf16: float, fp8: float | None = None, fp4: float | None = None) -> dict[torch.dtype, float]:
    rates = {torch.bfloat16: bf16, torch.float16: bf16, torch.float8_e4m3fn: fp8, torch.float4_e2m1fn_x2: fp4}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


# TFLOP/s without sparsity, by the full name of a GPU: laptop, MIG and export variants match nothing.
PEAK_TERAFLOPS: dict[str, dict[torch.dtype, float]] = {
    # NVIDIA A100 datasheet (2021)
    r"A100-SXM4?-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe": _peaks(312.0),
    # NVIDIA H100 datasheet (2023): SXM, PCIe, NVL; H200 datasheet (2024); GH200 datasheet (2024)
    r"H100 80GB HBM3|H200|GH200 (480GB|144G HBM3e)": _peaks(989.4, 1978.9),
    r"H100 PCIe": _peaks(756.5, 1513.0),
    r"H100 NVL|H200 NVL": _peaks(835.5, 1671.0),
    # NVIDIA L40S datasheet (2023)
    r"L40S": _peaks(362.05, 733.0),
    # HGX B200 and GB200 NVL72 datasheets (2024), HGX B300 and GB300 NVL72 datasheets (2025)
    r"B200": _peaks(2250.0, 4500.0, 9000.0),
    r"GB200": _peaks(2500.0, 5000.0, 10000.0),
    r"B300": _peaks(2250.0, 4500.0, 13500.0),
    r"GB300": _peaks(2500.0, 5000.0, 15000.0),
    # NVIDIA RTX Blackwell PRO whitepaper (2025)
    r"RTX PRO 6000 Blackwell (Server|Workstation) Edition": _peaks(503.8, 1007.6, 2015.2),
    # NVIDIA architecture whitepapers, GeForce tables: GA102 (2020), Ada (2022), RTX Blackwell (2025)
    r"RTX 3090": _peaks(71.0),
    r"RTX 4090": _peaks(165.2, 330.3),
    r"RTX 5090": _peaks(209.5, 419.0, 1676.0),
}


def _best(device: Device, native_passed: bool) -> tuple[Backend, str]:
    if _too_old(device):
        return (
            Backend.REFERENCE,
            f"plain PyTorch: emulation needs sm_80 or newer, this is {_full_name(device)}",
        )
    if unsupported_fp4(device) is not None:
        return Backend.EMULATED, _quantizer(device)
    if native_passed:
        return Backend.NATIVE, f"FP4 tensor cores of {_full_name(device)}; the self-check passed"
    return (
        Backend.EMULATED,
        f"{_quantizer(device)}; its FP4 tensor cores have not passed the self-check",
    )


def _quantizer(device: Device) -> str:
    """How the emulated backend quantizes on this device."""
    reason = unsupported_triton(device)
    if reason is None:
        return f"fused Triton kernels, and BF16 tensor cores on dequantized operands ({_full_name(device)})"
    if device.kind == "cpu":
        if device.cpp_compiler is None:
            return "plain PyTorch on the CPU, slower than compiled code: no C++ compiler found (install g++)"
        return "the compiled reference and dequantized operands on the CPU"
    if device.kind == "cuda":
        return f"plain PyTorch quantizer, slow, and BF16 tensor cores on dequantized operands: {reason}"
    return f"plain PyTorch quantizer, same bits, slow, and BF16 GEMMs, untested on this hardware: {reason}"


def _too_old(device: Device) -> bool:
    return device.kind == "cuda" and (device.capability is None or device.capability < MIN_EMULATED)


def _full_name(device: Device) -> str:
    architecture = f" (sm_{device.capability[0]}{device.capability[1]})" if device.capability else ""
    return f"{device.name}{architecture}"


def _present() -> list[str]:
    """The kinds of device on this machine, best first."""
    kinds = ["rocm" if torch.version.hip else "cuda"] if torch.cuda.is_available() else []
    kinds += ["xpu"] if torch.xpu.is_available() else []
    kinds += ["mps"] if torch.backends.mps.is_available() else []
    return [*kinds, "cpu"]


def _identify(kind: str, index: int | None) -> tuple[str, tuple[int, int] | None, int | None]:
    """Name, compute capability (NVIDIA only) and memory in bytes."""
    if kind in ("cuda", "rocm"):
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        return gpu.name, (gpu.major, gpu.minor) if kind == "cuda" else None, gpu.total_memory
    if kind == "xpu":
        gpu = torch.xpu.get_device_properties(torch.xpu.current_device() if index is None else index)
        return gpu.name, None, gpu.total_memory
    if kind == "mps":
        return "Apple GPU", None, torch.mps.recommended_max_memory()
    return f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})", None, _machine_memory()


def idle_nvidia_gpu() -> str | None:
    """Why torch uses no NVIDIA GPU although nvidia-smi lists one, with the remedy; None without a problem."""
    program = shutil.which("nvidia-smi")
    if program is None or torch.cuda.is_available():
        return None
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    gpus = [line.strip() for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if listed.returncode or not gpus:
        return None
    name = gpus[0].partition(": ")[2].partition(" (UUID")[0]
    if torch.version.cuda is None:
        python = sys.executable
        return (
            f"torch {torch.__version__} is built for CPUs only, beside {name}. Run `make install` in the "
            f"clone, or `{python} -m pip uninstall -y torch triton && {python} -m pip install torch`"
        )
    return (
        f"torch {torch.__version__} finds no usable GPU, beside {name}: its CUDA {torch.version.cuda} may "
        "need a newer driver (nvidia-smi shows which CUDA the driver supports), or CUDA_VISIBLE_DEVICES "
        "hides the GPU"
    )


def _machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def _cpp_compiler() -> str | None:
    """Path of the compiler that torch.compile calls for CPU code: $CXX or the system's default."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which((os.environ.get("CXX") or default).split()[0])
