"""What an operator observed reaches the book by a kernel on a card: as by torch, and built for all cards."""

import pytest
import torch

from fourbits.linear.kernels import observe_triton as amax_triton
from support.kernel_builds import on_gpu, recording
from support.triton_interpreter import run


def test_the_kernel_adds_to_the_book_what_torch_adds():
    result = run("observe_case")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("card", [90, 100, 120])
def test_the_kernel_is_built_for_every_card(card):
    amaxes, counters = on_gpu(6, 18, dtype=torch.float32), on_gpu(6, 8, dtype=torch.int64)
    own, counts = on_gpu(4, dtype=torch.float32), on_gpu(4, 4, dtype=torch.int64)
    with recording(amax_triton) as starts:
        amax_triton.observe(amaxes[2:, 1], counters[2:, 4:], own, counts, with_counts=True)
    (start,) = starts
    assert start.build(card).asm["cubin"]
