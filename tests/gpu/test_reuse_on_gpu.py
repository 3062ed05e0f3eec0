"""Whatever is written between calls on a GPU, also by CUDA graphs, layers compute from what is there."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from support.random_writes import Sequence

pytestmark = pytest.mark.gpu


class _Copy(NamedTuple):
    """A graph that copies `source` into x."""

    x: Tensor
    source: Tensor
    graph: torch.cuda.CUDAGraph


class Replays:
    """Writes tensors by replays of graphs, which are captured once for each tensor."""

    def __init__(self) -> None:
        self.copies: list[_Copy] = []

    def __call__(self, x: Tensor, value: Tensor) -> None:
        copies = [copy for copy in self.copies if copy.x is x] or [self.captured(x)]
        version = x._version
        copies[0].source.copy_(value)
        copies[0].graph.replay()
        assert x._version == version

    def captured(self, x: Tensor) -> _Copy:
        source, graph = x.detach().clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.data.copy_(source)
        self.copies.append(_Copy(x, source, graph))
        return self.copies[-1]


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "quartet2"])
def test_writes_between_calls_leave_the_bits_of_a_fresh_model(recipe):
    for seed in range(24 if recipe == "nvfp4" else 6):
        Sequence(seed, recipe, "cuda", (Replays(),)).run()
