"""Fixtures of the tests of linear layers."""

from collections import defaultdict

import pytest
from torch._dynamo import config as dynamo_config

from fourbits.gemm.kernels import gemms
from fourbits.gemm.kernels.launch_bf16 import bf16_gemm
from fourbits.linear.plan import input_side, linear_plan
from fourbits.quant import quantize as dispatch
from fourbits.quant.kernels import launch_stats, support
from fourbits.quant.kernels.launcher import Launcher

# Layers that other tests compiled count towards the limit of graphs of one function.
dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 1 << 12


@pytest.fixture
def launches(monkeypatch):
    """Kernels that would have been launched: the GPU's path on CPU tensors."""
    found: list[str] = []
    monkeypatch.setattr(support, "unsupported_device", lambda device: None)
    monkeypatch.setattr(gemms, "unsupported_device", lambda device: None)
    monkeypatch.setattr(
        Launcher, "__call__", lambda launcher, *arguments: found.append(launcher._kernel.fn.__name__)
    )
    stats = defaultdict(lambda: lambda *_, **__: found.append("stats_kernel"))  # by its grid
    monkeypatch.setattr(launch_stats, "stats_kernel", stats)
    forget_plans()
    yield found
    forget_plans()


def forget_plans():
    for cache in (dispatch.quantizer, linear_plan, input_side, bf16_gemm):
        cache.cache_clear()
