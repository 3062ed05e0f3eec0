"""Bitwise equal runs on a GPU, too, whatever operations PyTorch selects.

PyTorch's backward pass of attention over long sequences adds in the order in which threads finish, which
differs from run to run. All kernels of fourbits are deterministic. docs/running.md has the cost.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as torch_setting

#: cuBLAS is deterministic with workspaces of fixed size; this is the size that PyTorch chooses on Hopper
_WORKSPACE = ":4096:8"
#: a setting of torch that costs a pass over every new tensor
_FILL = "fill_uninitialized_memory"


@contextmanager
def deterministic(enabled: bool, device: str) -> Generator[None]:
    """Run deterministic operations inside, on a CUDA device if enabled. device: a type, such as cuda.

    An operation without a deterministic form raises RuntimeError, which names it.
    """
    if not enabled or device != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    before = torch.are_deterministic_algorithms_enabled()
    fills: bool = getattr(torch_setting, _FILL)
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    setattr(torch_setting, _FILL, False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        setattr(torch_setting, _FILL, fills)
