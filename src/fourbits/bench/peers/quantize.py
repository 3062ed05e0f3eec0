"""Quantization by torchao and fouroversix on a CPU, if installed."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from torch import Tensor


def quantize_peers(x: Tensor) -> dict[str, Callable[[], object]]:
    """Name with version -> function that quantizes x, bf16 [R, C], to NVFP4, with its amax pass."""
    peers = {"torchao": _torchao, "fouroversix": _fouroversix}
    return {f"{name} {version(name)}": make(x) for name, make in peers.items() if find_spec(name)}


def _torchao(x: Tensor) -> Callable[[], object]:
    module = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def run() -> object:
        scale = module.per_tensor_amax_to_scale(x.abs().max().float())
        return module.nvfp4_quantize(x, 16, scale)

    return run


def _fouroversix(x: Tensor) -> Callable[[], object]:
    module = import_module("fouroversix")
    if version("fouroversix").startswith("0."):
        return lambda: module.quantize_to_fp4(
            x, backend=module.QuantizeBackend.pytorch, scale_rule=module.AdaptiveBlockScalingRule.always_6
        )
    config = module.QuantizationConfig(backend="pytorch", scale_rule="static_6")
    return lambda: module.quantize_to_fp4(x, config)
