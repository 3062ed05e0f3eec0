"""Runs transformers' NemotronH with the Triton kernels of mamba_ssm, if installed, and counts their calls.

transformers uses a fused kernel that also needs causal_conv1d's CUDA code, for which no package index has a
binary. Here its mixer calls mamba_ssm's chunked scan, for a single token mamba_ssm's state update, and
PyTorch's convolution.
"""

import importlib
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_SCAN, _UPDATE = "mamba_chunk_scan_combined", "selective_state_update"
_MODULES = {_SCAN: "ssd_combined", _UPDATE: "selective_state_update"}
_MIXERS = "transformers.models.nemotron_h.modeling_nemotron_h"


def unsupported() -> str | None:
    """Why the kernels cannot be used, or None."""
    try:
        kernels = _kernels()
        mixers = importlib.import_module(_MIXERS)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # compiled parts may be missing
        return f"mamba_ssm's kernels cannot be imported: {type(error).__name__}: {error}"
    missing = [name for name in _replacements(kernels) if not hasattr(mixers, name)]
    return f"this transformers has no {', '.join(missing)} to replace" if missing else None


@contextmanager
def mamba_kernels() -> Generator[Counter[str]]:
    """Inside the block, NemotronH's mixers use mamba_ssm's kernels. Yields the number of calls of each."""
    calls: Counter[str] = Counter()
    counted = {name: _counted(name, kernel, calls) for name, kernel in _kernels().items()}
    mixers = importlib.import_module(_MIXERS)
    replacements = _replacements(counted)
    before = {name: getattr(mixers, name) for name in replacements}
    try:
        for name, function in replacements.items():
            setattr(mixers, name, function)
        yield calls
    finally:
        for name, function in before.items():
            setattr(mixers, name, function)


def _counted(name: str, kernel: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    """A wrapper that passes only the arguments of transformers that the kernel supports."""
    known = set(inspect.signature(kernel).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return kernel(*args, **{key: value for key, value in kwargs.items() if key in known})

    return call


def _replacements(kernels: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Names in transformers' module -> replacements; the fused kernel reports that it is unavailable."""
    return {
        "mamba2_chunk_scan": kernels[_SCAN],
        "mamba2_selective_state_update": kernels[_UPDATE],
        "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
    }


def _kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by name. mamba_ssm also imports Mamba-1's compiled extension, which they do not need."""
    importlib.import_module(_MIXERS)  # imported first, so that transformers selects its own fallbacks
    stub = ModuleType("selective_scan_cuda")
    if "selective_scan_cuda" not in sys.modules and importlib.util.find_spec(stub.__name__) is None:
        sys.modules[stub.__name__] = stub
    return {
        name: getattr(importlib.import_module(f"mamba_ssm.ops.triton.{module}"), name)
        for name, module in _MODULES.items()
    }
