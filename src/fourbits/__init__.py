"""Pretraining of language models in 4-bit floating point (NVFP4), by the method of arXiv:2509.25149.

The public names are loaded at first use, so that `fourbits --help` need not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version

__version__ = version("fourbits")

# public name -> the module that defines it
_HOME = {
    "OperandSpec": "fourbits.quant.operand",
    "QuantizedTensor": "fourbits.quant.tensor",
    "quantize": "fourbits.quant.quantize",
    "matmul": "fourbits.gemm.matmul",
    "Recipe": "fourbits.recipe.recipe",
    "get_recipe": "fourbits.recipe.presets",
    "list_recipes": "fourbits.recipe.presets",
    "convert": "fourbits.recipe.convert",
    "set_step": "fourbits.recipe.convert",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fourbits' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
