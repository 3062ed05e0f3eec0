"""The kernel that adds what an operator observed to the recipe state: as torch does, built for all GPUs."""

import pytest
import torch

from fourbits.linear.kernels import observe_triton
from support.kernel_builds import on_gpu, recording
from support.triton_interpreter import run


def test_the_kernel_adds_what_torch_adds():
    result = run("observe_case")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_the_kernel_is_built_for_every_gpu(sm):
    amaxes, counters = on_gpu(6, 18, dtype=torch.float32), on_gpu(6, 8, dtype=torch.int64)
    own, counts = on_gpu(4, dtype=torch.float32), on_gpu(4, 4, dtype=torch.int64)
    with recording(observe_triton) as starts:
        observe_triton.observe(amaxes[2:, 1], counters[2:, 4:], own, counts, with_counts=True)
    (start,) = starts
    assert start.build(sm).asm["cubin"]
