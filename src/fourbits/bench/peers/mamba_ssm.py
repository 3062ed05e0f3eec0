"""transformers' NemotronH with the Triton kernels of mamba_ssm, where they are installed; calls are counted.

transformers uses a fused kernel that also needs causal_conv1d's CUDA code, which is on no package index as a
binary. Here its mixer calls mamba_ssm's chunked scan instead of its own, and PyTorch's convolution.
"""

import importlib
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_SCAN = "mamba_chunk_scan_combined"
_MIXERS = "transformers.models.nemotron_h.modeling_nemotron_h"


def unsupported() -> str | None:
    """Why the kernels cannot be used, or None."""
    try:
        _kernel()
        mixers = importlib.import_module(_MIXERS)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # compiled parts may be missing
        return f"mamba_ssm's kernels cannot be imported: {type(error).__name__}: {error}"
    missing = [name for name in _replacements(lambda: None) if not hasattr(mixers, name)]
    return f"this transformers has no {', '.join(missing)} to replace" if missing else None


@contextmanager
def mamba_kernels() -> Generator[Counter[str]]:
    """Inside, NemotronH's mixers use mamba_ssm's kernels. Yields the number of calls of each."""
    calls: Counter[str] = Counter()
    kernel = _kernel()
    known = set(inspect.signature(kernel).parameters)

    def scan(*args: Any, **kwargs: Any) -> Any:
        calls[_SCAN] += 1
        return kernel(*args, **{name: value for name, value in kwargs.items() if name in known})

    mixers = importlib.import_module(_MIXERS)
    before = {name: getattr(mixers, name) for name in _replacements(scan)}
    try:
        for name, function in _replacements(scan).items():
            setattr(mixers, name, function)
        yield calls
    finally:
        for name, function in before.items():
            setattr(mixers, name, function)


def _replacements(scan: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Names in transformers' module -> replacements; the fused kernel reports that it is unavailable."""
    return {"mamba2_chunk_scan": scan, "mamba2_split_conv1d_scan_combined": lambda *_, **__: None}


def _kernel() -> Callable[..., Any]:
    """The chunked scan. mamba_ssm also imports Mamba-1's compiled extension, which the scan does not need."""
    importlib.import_module(_MIXERS)  # first, so that transformers selects its own fallbacks
    stub = ModuleType("selective_scan_cuda")
    if "selective_scan_cuda" not in sys.modules and importlib.util.find_spec(stub.__name__) is None:
        sys.modules[stub.__name__] = stub
    return getattr(importlib.import_module("mamba_ssm.ops.triton.ssd_combined"), _SCAN)
