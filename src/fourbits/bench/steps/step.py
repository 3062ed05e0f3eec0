"""Speed of whole training steps relative to the same step in BF16: forward, backward and optimizer.

Steps are those of `fourbits train`: the preset's micro-batches, everything but the linear layers compiled,
and on a GPU replayed from CUDA graphs. Tokens are random.
"""

import torch

from fourbits.bench.steps.training_step import TrainingStep
from fourbits.bench.timing import Measurements, Result, copy_bandwidth, measured, medians, product_rate
from fourbits.device import probe
from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.model.regions import compile_regions
from fourbits.train.config import RunConfig
from fourbits.train.presets import RUN_PRESETS

#: device kind -> (preset, target of nvfp4)
_CASES = {"cpu": ("tiny", 0.5), "cuda": ("30m", 0.80)}
#: the same for an H200, whose BF16 steps are faster
_H200_GOAL = 0.78
_RECIPES = ("bf16", "nvfp4", "mxfp4", "fp8")
#: recipes compared with nvfp4, and their targets relative to its speed: at most 1.15 and 1.35 of its time
_OF_NVFP4 = {"nvfp4-46": 1 / 1.15, "quartet2-46": 1 / 1.35}


def bench_step(device: torch.device) -> Measurements:
    """Time one step of the device's preset in each recipe, alternating, relative to BF16 or to nvfp4."""
    preset, goal = _CASES[device.type]
    if probe(device).name == "NVIDIA H200":
        goal = _H200_GOAL
    config, recipes = RUN_PRESETS[preset], (*_RECIPES, *_OF_NVFP4)
    times = medians([_step(config, recipe, device) for recipe in recipes], device, repeats=10)
    seconds = dict(zip(recipes, times, strict=True))
    results = [
        Result(
            name=f"{preset}, {recipe}",
            seconds=seconds[recipe],
            value=seconds["bf16"] / seconds[recipe],
            unit="of BF16",
            goal=goal if recipe == "nvfp4" else None,
        )
        for recipe in _RECIPES
    ]
    results += [
        Result(
            name=f"{preset}, {recipe}",
            seconds=seconds[recipe],
            value=seconds["nvfp4"] / seconds[recipe],
            unit="of nvfp4",
            goal=goal_of_nvfp4,
        )
        for recipe, goal_of_nvfp4 in _OF_NVFP4.items()
    ]
    return measured("step", device, tuple(results), (copy_bandwidth(device), product_rate(device)))


def _step(config: RunConfig, recipe: str, device: torch.device) -> TrainingStep:
    model = LanguageModel(config.model, seed=0).to(device)
    convert(model, recipe)
    compile_regions(model)
    return TrainingStep(model, config)
