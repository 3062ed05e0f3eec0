"""Functions under torch.compile, fused and with equal bits; C++ built by the same compiler.

Where no C++ compiler works, the eager function runs instead, slower, and one warning says so.
"""

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config  # pyright: ignore[reportPrivateUsage]
from torch._dynamo import mark_static  # pyright: ignore[reportPrivateUsage]
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import (  # pyright: ignore[reportPrivateUsage]
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
)
from torch._inductor.codecache import CppCodeCache  # pyright: ignore[reportPrivateUsage]
from torch._inductor.exc import CppCompileError, InductorError  # pyright: ignore[reportPrivateUsage]

from fourbits.compile_notice import compilation_disabled, compiling

P = ParamSpec("P")
T = TypeVar("T")

#: wraps a function in one that runs it: `compiled` or `eager`
Runner = Callable[[Callable[..., Any]], Callable[..., Any]]

#: distinct specs that one function may be compiled for, beyond which it runs eagerly; the compiler's default
#: of 8 is fewer than one recipe needs
_LIMITS = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
#: elements from which the compiled source is worth its compilation
COMPILE_FROM = 1 << 16
#: settings that affect bytes and that a user may have changed for other code (TORCHINDUCTOR_CPP_ENABLE_...)
_EXACT = {"cpp.enable_unsafe_math_opt_flag": False, "cpp.enable_floating_point_contract_flag": "off"}
#: the same for the project's own C++
_EXACT_FLAGS = ("-fno-unsafe-math-optimizations", "-ffp-contract=off")
_broken: list[str] = []
#: how many `uncompiled_quantizers` are open
_uncompiled = [0]


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function` compiled for any shape. A compiler that fails raises nothing: one warning reports it.

    It returns tensors or plain tuples of them: torch 2.11 cannot return a named tuple from compiled code.
    """
    return _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Limits of the whole process: to patch them around each call costs as much as a small call.
    for limit, least in _LIMITS.items():
        setattr(dynamo_config, limit, max(least, getattr(dynamo_config, limit)))
    fast = torch.compile(function, fullgraph=True, dynamic=True, options=_EXACT)  # pyright: ignore

    def call(*args: Any, **kwargs: Any) -> Any:
        if _broken or compilation_disabled():
            return function(*args, **kwargs)
        try:
            with _ours:
                return fast(*args, **kwargs)
        except (BackendCompilerFailed, InductorError) as error:
            _broken.append(str(error))
            warnings.warn(
                f"quantization runs uncompiled, about 20 times slower: {_reason(error)}. "
                "Install a C++ compiler (g++ or clang++) to speed it up; the bits are the same.",
                stacklevel=2,
            )
            return function(*args, **kwargs)
        except FailOnRecompileLimitHit:
            _warn_of_variants(function.__name__)
            return function(*args, **kwargs)

    return call


@functools.cache
def _warn_of_variants(name: str) -> None:
    limit = min(dynamo_config.recompile_limit, dynamo_config.accumulated_recompile_limit)
    warnings.warn(
        f"quantization: {name} runs uncompiled, slower, for further specs: it was compiled {limit} times. "
        "Raise torch._dynamo.config.recompile_limit to compile more; the bits are the same.",
        stacklevel=3,
    )


@functools.cache
def native(source: str, name: str, arguments: tuple[Any, ...]) -> Callable[..., int] | None:
    """The C function `name`, which returns an int, of C++ source that is built once per machine.

    arguments: their ctypes. None where building fails; one warning reports it, and callers do without.
    """
    if _broken:
        return None
    try:
        with compiling(name):
            library = cast(ctypes.CDLL, CppCodeCache.load(source, extra_flags=_EXACT_FLAGS))
    except (RuntimeError, OSError) as error:  # what the compiler, or the lack of one, raises
        warnings.warn(
            f"{name} runs in stages, about twice as slow: {_reason(error)}. "
            "Install g++ 9 or clang++ 12, or newer, to speed it up; the bits are the same.",
            stacklevel=3,
        )
        return None
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return cast("Callable[..., int]", function)


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """`function` unchanged."""
    return function


def worth_compiling(x: Tensor) -> bool:
    """Whether functions of x run compiled: on a CPU, from COMPILE_FROM elements on.

    Not on CUDA: the compiler's division there is not correctly rounded. Not while torch.compile traces a
    caller: it compiles the eager source with the caller's.
    """
    if torch.compiler.is_compiling() or _uncompiled[0]:
        return False
    return x.device.type == "cpu" and x.numel() >= max(COMPILE_FROM, 1)


@contextmanager
def uncompiled_quantizers() -> Generator[None]:
    """A context in which nothing is compiled: for many formats of a few tensors each. Same bits."""
    _uncompiled[0] += 1
    try:
        yield
    finally:
        _uncompiled[0] -= 1


def runner_for(x: Tensor) -> Runner:
    """`compiled` where x is worth it, else `eager`."""
    return compiled if worth_compiling(x) else eager


def with_static_sizes(x: Tensor, *dims: int) -> Tensor:
    """x, with the sizes of these dimensions marked as constants of the code compiled for it."""
    mark_static(x, list(dims))
    return x


class _Ours(threading.local):
    """Calls of functions that are compiled here; torch.compile reports a compilation of any function."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_ours = _Ours()
_open: list[AbstractContextManager[None]] = []


def _on_start(_: object) -> None:
    if _ours.depth:
        _open.append(compiling("CPU quantizer"))
        _open[-1].__enter__()


def _on_end(_: object) -> None:
    if _open:  # whichever thread ends last
        _open.pop().__exit__(None, None, None)


callback_handler.register_start_callback(_on_start)
callback_handler.register_end_callback(_on_end)


def _reason(error: Exception) -> str:
    """Why compilation failed, in one line: the C++ compiler's own message, if it printed one."""
    cause = getattr(error, "inner_exception", error)
    message = cause.output if isinstance(cause, CppCompileError) else str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    if lines:
        return (errors or lines)[0]
    return "the C++ compiler was killed without a message (out of memory?)"
