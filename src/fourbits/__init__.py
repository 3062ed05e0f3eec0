"""Pretraining of language models in 4-bit floating point (NVFP4), by the method of arXiv:2509.25149.

The public names are loaded at first use, so that `fourbits --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fourbits.version import VERSION

if TYPE_CHECKING:  # the same names for editors and type checkers, which do not run __getattr__
    from fourbits.exchange.folder import load_hf as load_hf
    from fourbits.exchange.folder import save_hf as save_hf
    from fourbits.gemm.matmul import matmul as matmul
    from fourbits.gemm.reference.tensor_core import TENSOR_CORES as TENSOR_CORES
    from fourbits.gemm.reference.tensor_core import TensorCore as TensorCore
    from fourbits.gemm.reference.tensor_core import tensor_core_dot as tensor_core_dot
    from fourbits.linear.amax_reduction import register_amax_reduction as register_amax_reduction
    from fourbits.linear.audit import AuditReport as AuditReport
    from fourbits.linear.audit import audit as audit
    from fourbits.linear.convert import convert as convert
    from fourbits.linear.feature_shard import shard_features as shard_features
    from fourbits.linear.monitor.health import HealthReport as HealthReport
    from fourbits.linear.monitor.health import health as health
    from fourbits.linear.oscillation import OscillationReset as OscillationReset
    from fourbits.linear.set_recipe import set_recipe as set_recipe
    from fourbits.linear.step import set_step as set_step
    from fourbits.linear.summary import ConversionSummary as ConversionSummary
    from fourbits.linear.weight_source import set_weight_source as set_weight_source
    from fourbits.quant.correction import Correction as Correction
    from fourbits.quant.correction import register_correction as register_correction
    from fourbits.quant.fake_quantize import fake_quantize as fake_quantize
    from fourbits.quant.feedback_coefficients import feedback_coefficients as feedback_coefficients
    from fourbits.quant.operand import OperandSpec as OperandSpec
    from fourbits.quant.quantize import quantize as quantize
    from fourbits.quant.register import register_block_format as register_block_format
    from fourbits.quant.register import register_scale_rule as register_scale_rule
    from fourbits.quant.tensor import QuantizedTensor as QuantizedTensor
    from fourbits.recipe.oscillation import Oscillation as Oscillation
    from fourbits.recipe.presets import get_recipe as get_recipe
    from fourbits.recipe.presets import list_recipes as list_recipes
    from fourbits.recipe.recipe import KeepBF16 as KeepBF16
    from fourbits.recipe.recipe import LayerRule as LayerRule
    from fourbits.recipe.recipe import Recipe as Recipe
    from fourbits.recipe.schedule import PrecisionPhase as PrecisionPhase
    from fourbits.train.export import export_trained as export_trained
    from fourbits.train.load_run import load_trained as load_trained
    from fourbits.train.sinks import register_sink as register_sink

__version__ = VERSION

# public name -> the module that defines it
_HOME = {
    "OperandSpec": "fourbits.quant.operand",
    "QuantizedTensor": "fourbits.quant.tensor",
    "quantize": "fourbits.quant.quantize",
    "fake_quantize": "fourbits.quant.fake_quantize",
    "feedback_coefficients": "fourbits.quant.feedback_coefficients",
    "matmul": "fourbits.gemm.matmul",
    "TENSOR_CORES": "fourbits.gemm.reference.tensor_core",
    "TensorCore": "fourbits.gemm.reference.tensor_core",
    "tensor_core_dot": "fourbits.gemm.reference.tensor_core",
    "register_block_format": "fourbits.quant.register",
    "register_scale_rule": "fourbits.quant.register",
    "Correction": "fourbits.quant.correction",
    "register_correction": "fourbits.quant.correction",
    "Recipe": "fourbits.recipe.recipe",
    "KeepBF16": "fourbits.recipe.recipe",
    "LayerRule": "fourbits.recipe.recipe",
    "PrecisionPhase": "fourbits.recipe.schedule",
    "Oscillation": "fourbits.recipe.oscillation",
    "get_recipe": "fourbits.recipe.presets",
    "list_recipes": "fourbits.recipe.presets",
    "convert": "fourbits.linear.convert",
    "set_recipe": "fourbits.linear.set_recipe",
    "set_weight_source": "fourbits.linear.weight_source",
    "register_amax_reduction": "fourbits.linear.amax_reduction",
    "shard_features": "fourbits.linear.feature_shard",
    "ConversionSummary": "fourbits.linear.summary",
    "audit": "fourbits.linear.audit",
    "AuditReport": "fourbits.linear.audit",
    "health": "fourbits.linear.monitor.health",
    "HealthReport": "fourbits.linear.monitor.health",
    "OscillationReset": "fourbits.linear.oscillation",
    "set_step": "fourbits.linear.step",
    "load_hf": "fourbits.exchange.folder",
    "save_hf": "fourbits.exchange.folder",
    "load_trained": "fourbits.train.load_run",
    "export_trained": "fourbits.train.export",
    "register_sink": "fourbits.train.sinks",
}


if not TYPE_CHECKING:  # which would otherwise accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'fourbits' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_HOME]
