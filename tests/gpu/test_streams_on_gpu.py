"""Linear layers on streams and threads of their own: the bits of one stream and one thread."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourbits import convert
from support.branches import Branches, assert_same, gradients

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
STEPS, THREADS = 12, 2


class Recomputed(nn.Module):
    """A model whose forward runs again in the backward pass, on autograd's thread."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


def branches(recipe, recomputed=False):
    model = Branches().to(GPU)
    convert(model, recipe)
    return Recomputed(model) if recomputed else model


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "quartet2"])
def test_a_stream_of_ones_own_gives_equal_bits_while_the_default_one_is_busy(recipe):
    """Whatever were launched on the default stream would come too late."""
    model, x = branches(recipe), torch.randn(64, 48, device=GPU)
    wanted = [value.cpu() for value in gradients(model, x)]
    own = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(own):
        gradients(model, x)  # what a model copies once is where it is needed
        own.synchronize()
    torch.cuda._sleep(1 << 29)
    with torch.cuda.stream(own):
        found = [value.cpu() for value in gradients(model, x)]
    torch.cuda.synchronize()
    assert_same(found, wanted)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_threads_with_models_and_streams_of_their_own_get_the_bits_they_get_alone(recipe, recomputed):
    models = [branches(recipe, recomputed) for _ in range(THREADS)]
    samples = torch.randn(THREADS, STEPS, 64, 48, device=GPU)

    def steps(thread, model):
        return [value for step in range(STEPS) for value in gradients(model, samples[thread, step], step)]

    alone = [steps(thread, copy.deepcopy(model)) for thread, model in enumerate(models)]
    torch.cuda.synchronize()
    start = Barrier(THREADS)

    def on_a_stream(thread):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            start.wait()
            found = steps(thread, models[thread])
            stream.synchronize()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(on_a_stream, range(THREADS)))
    for found, wanted in zip(together, alone, strict=True):
        assert_same(found, wanted)
