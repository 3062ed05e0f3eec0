"""Speed of whole training steps, as a share of the same step in BF16: forward, backward and optimizer.

Random tokens, the preset's micro-batches a step, everything but the linears compiled and on a card replayed
from CUDA graphs, as `fourbits train` does it.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from fourbits.bench.timing import Bar, Report, copy_bandwidth, measured, medians, product_rate
from fourbits.model.lm import LanguageModel
from fourbits.model.regions import compile_regions
from fourbits.recipe.convert import convert, set_step
from fourbits.train.captured import CapturedGradients, why_not_captured
from fourbits.train.config import RunConfig
from fourbits.train.optim import MasterOptimizer
from fourbits.train.presets import RUN_PRESETS

#: device kind -> (preset, goal of nvfp4)
_CASES = {"cpu": ("tiny", 0.5), "cuda": ("30m", 0.7)}
_RECIPES = ("bf16", "nvfp4", "mxfp4", "fp8")


def bench_step(device: torch.device) -> Report:
    """One step of the device's preset in each recipe, in turns, beside BF16."""
    preset, goal = _CASES[device.type]
    config = RUN_PRESETS[preset]
    times = medians([_step(config, recipe, device) for recipe in _RECIPES], device, repeats=10)
    bars = tuple(
        Bar(
            name=f"{preset}, {recipe}",
            seconds=seconds,
            value=times[0] / seconds,
            unit="of BF16",
            goal=goal if recipe == "nvfp4" else None,
        )
        for recipe, seconds in zip(_RECIPES, times, strict=True)
    )
    return measured("step", device, bars, (copy_bandwidth(device), product_rate(device)))


def _step(config: RunConfig, recipe: str, device: torch.device) -> Callable[[], object]:
    """A training step that can be called again and again."""
    model = LanguageModel(config.model, seed=0).to(device)
    convert(model, recipe)
    compile_regions(model)
    optimizer = MasterOptimizer(dict(model.named_parameters()), config.optim)
    shape = (config.train.micro_batch_size, config.train.seq_len + 1)
    samples = torch.randint(config.model.vocab_size, shape, device=device)
    not_blocked = torch.zeros((), device=device)
    count = config.train.gradient_accumulation
    steps = itertools.count()

    def gradients(samples: Tensor) -> Tensor:
        summed, tokens = model.loss(samples[:, :-1], samples[:, 1:])
        loss = summed / (tokens * count)
        loss.backward()
        return loss.detach()

    captured = CapturedGradients(gradients, model, list(model.parameters()))
    eager = why_not_captured(model, device) is not None

    def step() -> object:
        now, loss = next(steps), not_blocked
        for micro_batch in range(count):
            set_step(model, now, first_token=micro_batch * shape[0] * config.train.seq_len)
            loss = gradients(samples) if eager else captured(samples, micro_batch == 0)
        return optimizer.step(1e-6, loss, not_blocked)

    return step
