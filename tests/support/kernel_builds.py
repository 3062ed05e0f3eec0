"""Compile the kernels that a call would launch, for any GPU and without one.

A plan for a CUDA device runs on CPU tensors; the kernels it would launch are recorded and compiled ahead of
time, with the tiles, types and alignments that the plan chose.
"""

import re
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.request import Signature, signature_of

GPU = torch.device("cuda", 0)

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True  # pyright: ignore[reportAssignmentType]
    device = GPU  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True)
class Start:
    """One launch of a kernel."""

    kernel: Any
    arguments: dict[str, Any]

    def build(self, capability: int) -> CompiledKernel:
        """The kernel compiled for sm_<capability>."""
        names = self.kernel.arg_names
        defaults = {p.name: p.default for p in self.kernel.params if p.has_default}
        arguments = defaults | self.arguments
        free = [p.name for p in self.kernel.params if p.is_constexpr or self._is_constant(p)]
        constants = {name: arguments[name] for name in free}
        options = {name: value for name, value in arguments.items() if name not in names}
        signature = {n: "constexpr" if n in free else _type_of(arguments[n]) for n in names}
        aligned = [n for n in names if n not in free and _is_aligned(arguments[n])]
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

    def _is_constant(self, parameter: Any) -> bool:
        """Whether the compiler is given the argument, 1 or None, as a constant, as it is at a launch."""
        value = self.arguments[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        return one or value is None


def stack_bytes(built: CompiledKernel) -> int:
    """Bytes of a thread's stack, which a kernel without arrays uses only for spilled registers."""
    return _usage(built, "STACK")


def registers(built: CompiledKernel) -> int:
    """Registers of a thread."""
    return _usage(built, "REG")


def _usage(built: CompiledKernel, of: str) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    (number,) = re.findall(rf"\b{of}:(\d+)", printed.stdout)
    return int(number)


class _Recorder:
    def __init__(self, kernel: Any, starts: list[Start]) -> None:
        self.kernel, self.starts = kernel, starts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*values: Any, **named: Any) -> None:
            self.starts.append(
                Start(self.kernel, dict(zip(self.kernel.arg_names, values, strict=False)) | named)
            )

        return start


@contextmanager
def recording(*modules: ModuleType) -> Generator[list[Start]]:
    """Record launches instead of executing them: those of plans, and those of kernels in these modules.

    Tensors that a plan allocates on a GPU are on the CPU.
    """
    starts: list[Start] = []
    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    ]

    def record(launcher: Launcher, *values: Any) -> None:
        plain = [value[0].view(-1)[value[1] :] if type(value) is tuple else value for value in values]
        plain[: len(launcher._boxes)] = [
            box.descriptor(base) for box, base in zip(launcher._boxes, plain, strict=False)
        ]
        named = dict(zip(launcher._kernel.arg_names, plain, strict=False)) | launcher._constants
        starts.append(Start(launcher._kernel, named))

    def on_cpu(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *sizes, device=None, **options: allocate(*sizes, **options)

    allocate = {name: getattr(torch, name) for name in ("empty", "empty_strided", "ones", "zeros")}
    launch = Launcher.__call__
    try:
        setattr(Launcher, "__call__", record)  # noqa: B010
        for name, function in allocate.items():
            setattr(torch, name, on_cpu(function))
        for module, name, kernel in kernels:
            setattr(module, name, _Recorder(kernel, starts))
        yield starts
    finally:
        setattr(Launcher, "__call__", launch)  # noqa: B010
        for name, function in allocate.items():
            setattr(torch, name, function)
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor to plan for; its values are not read."""
    return torch.empty(shape, dtype=dtype).as_subclass(OnGpu)


def signature(x: torch.Tensor) -> Signature:
    """The signature that x would have on a GPU."""
    return signature_of(x)._replace(device=GPU)


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
