"""Speed of whole training steps relative to the same step in BF16: forward, backward and optimizer.

Steps are those of `fourbits train`: the preset's micro-batches, everything but the linear layers compiled,
and on a GPU replayed from CUDA graphs. Tokens are random.
"""

import torch

from fourbits.bench.steps.training_step import TrainingStep
from fourbits.bench.timing import Measurements, Result, copy_bandwidth, measured, medians, product_rate
from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.model.regions import compile_regions
from fourbits.train.config import RunConfig
from fourbits.train.presets import RUN_PRESETS

#: device kind -> (preset, target of nvfp4)
_CASES = {"cpu": ("tiny", 0.5), "cuda": ("30m", 0.7)}
_RECIPES = ("bf16", "nvfp4", "mxfp4", "fp8")


def bench_step(device: torch.device) -> Measurements:
    """Time one step of the device's preset in each recipe, in turns, relative to BF16."""
    preset, goal = _CASES[device.type]
    config = RUN_PRESETS[preset]
    times = medians([_step(config, recipe, device) for recipe in _RECIPES], device, repeats=10)
    results = tuple(
        Result(
            name=f"{preset}, {recipe}",
            seconds=seconds,
            value=times[0] / seconds,
            unit="of BF16",
            goal=goal if recipe == "nvfp4" else None,
        )
        for recipe, seconds in zip(_RECIPES, times, strict=True)
    )
    return measured("step", device, results, (copy_bandwidth(device), product_rate(device)))


def _step(config: RunConfig, recipe: str, device: torch.device) -> TrainingStep:
    model = LanguageModel(config.model, seed=0).to(device)
    convert(model, recipe)
    compile_regions(model)
    return TrainingStep(model, config)
