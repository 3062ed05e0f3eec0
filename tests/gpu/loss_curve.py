"""The losses of up to 200 steps of `30m`, 8 x 512 tokens each, with nvfp4: the same run on any device.

Tokens are drawn on the CPU: one in four at random; the others are a function of the token before, so that
there is something to learn. Run as a program, it prints a device's curve as JSON:

    PYTHONPATH=tests python -m gpu.loss_curve cpu 200 > tests/gpu/loss_curve_cpu.json
"""

import json
import sys
from dataclasses import replace

import torch
from torch import Tensor

from fourbits import convert, set_step
from fourbits.model.lm import LanguageModel
from fourbits.model.regions import compile_regions
from fourbits.train.optim import MasterOptimizer
from fourbits.train.presets import RUN_PRESETS

STEPS, SAMPLES, LENGTH, VOCABULARY, WARM_UP = 200, 8, 512, 8192, 20


def batches() -> Tensor:
    """Tokens of all steps, int64 [STEPS, SAMPLES, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.randperm(VOCABULARY, generator=generator)
    shape = (STEPS, SAMPLES, LENGTH + 1)
    drawn = (VOCABULARY * torch.rand(shape, generator=generator) ** 3).long()
    is_drawn = torch.rand(shape, generator=generator) < 0.25
    tokens = drawn.clone()
    for i in range(1, LENGTH + 1):
        tokens[..., i] = torch.where(is_drawn[..., i], drawn[..., i], follows[tokens[..., i - 1]])
    return tokens


def loss_curve(device: str, steps: int = STEPS, log: bool = False) -> list[float]:
    """Mean loss of each of the first steps. log: print each one to stderr as it is computed."""
    config = RUN_PRESETS["30m"]
    model = LanguageModel(replace(config.model, vocab_size=VOCABULARY), seed=0).to(device)
    convert(model, "nvfp4")
    compile_regions(model)
    optimizer = MasterOptimizer(dict(model.named_parameters()), config.optim)
    losses: list[float] = []
    for step, samples in enumerate(batches()[:steps]):
        samples = samples.to(device)
        set_step(model, step)
        total, count = model.loss(samples[:, :-1], samples[:, 1:])
        loss = total / count
        loss.backward()
        rate = config.optim.lr * min(1.0, (step + 1) / WARM_UP)
        optimizer.step(rate, loss.detach(), torch.zeros((), device=device), step)
        losses.append(loss.item())
        if log:
            print(step, losses[-1], file=sys.stderr, flush=True)
    return losses


def mean_difference(a: list[float], b: list[float]) -> float:
    """Mean of the losses' absolute differences over the second half of the steps."""
    half = len(a) // 2
    return sum(abs(x - y) for x, y in zip(a[half:], b[half:], strict=True)) / (len(a) - half)


if __name__ == "__main__":
    curve = loss_curve(sys.argv[1], int(sys.argv[2]), log=True)
    print(json.dumps([round(loss, 6) for loss in curve]))
