"""The model on a GPU against the model on a CPU."""

from typing import Any

import pytest
import torch

from fourbits.model.config import RopeScaling
from fourbits.model.regions import compile_regions
from model.shapes import random_tokens, small_model

pytestmark = pytest.mark.gpu

IMPORTED: dict[str, Any] = {
    "qk_norm": True,
    "sliding_window": 9,
    "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_seq_len=64),
}


def loss_and_gradients(model, tokens):
    loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("pattern", ["M-*-", "TM"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("changes", [{}, IMPORTED], ids=["plain", "imported"])
def test_a_gpu_computes_what_a_cpu_does(pattern, compiled, changes):
    tokens = random_tokens(2, 41)
    model = small_model(pattern, rope_theta=1e4, **changes).cuda()
    if compiled:
        compile_regions(model)
    found = loss_and_gradients(model, tokens.cuda())
    wanted_ones = loss_and_gradients(small_model(pattern, rope_theta=1e4, **changes), tokens)
    for got, wanted in zip(found, wanted_ones, strict=True):
        assert (got.cpu() - wanted).norm() <= 1e-5 * wanted.norm()  # FP32 sums in another order, five layers


def test_bf16_on_a_gpu_keeps_fp32_weight_gradients():
    model = small_model("M-*-T", dtype=torch.bfloat16).cuda()
    tokens = random_tokens(2, 17).cuda()
    exact = loss_and_gradients(small_model("M-*-T").cuda(), tokens)
    for got, wanted in zip(loss_and_gradients(model, tokens), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() <= 16 * 2**-9 * wanted.norm() + 1e-6  # a few BF16 roundings per layer
