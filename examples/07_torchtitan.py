"""torchtitan's debug Llama, in NVFP4, on GPUs: 07_torchtitan.py defines a config for torchtitan's command.

Run in a clone of torchtitan, with this folder in PYTHONPATH:
torchrun --nproc-per-node 2 -m torchtitan.train --module 07_torchtitan --config debug
"""

from typing import Any

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from fourbits.integrations.torchtitan import FourbitsConverter
from fourbits.integrations.torchtitan_trainer import FourbitsTrainer


def debug(recipe: str = "nvfp4") -> Any:
    """A config like those of torchtitan's config_registry."""
    config = llama3_debugmodel()
    converter = FourbitsConverter.Config(recipe=recipe, options={"exclude": ["*.wo"]})
    config.model_spec = model_registry("debugmodel", converters=[converter])
    config.training.disable_cuda_graphs = True
    config.checkpoint.enable = True
    return FourbitsTrainer.Config.of(config)
