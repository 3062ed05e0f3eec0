"""The model on a GPU against the model on a CPU."""

import pytest
import torch

from fourbits.model.regions import compile_regions
from model.shapes import random_tokens, small_model

pytestmark = pytest.mark.gpu


def loss_and_gradients(model, tokens):
    loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("pattern", ["M-*-", "TM"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_computes_what_a_cpu_does(pattern, compiled):
    tokens = random_tokens(2, 41)
    model = small_model(pattern, rope_theta=1e4).cuda()
    if compiled:
        compile_regions(model)
    found = loss_and_gradients(model, tokens.cuda())
    for got, wanted in zip(
        found, loss_and_gradients(small_model(pattern, rope_theta=1e4), tokens), strict=True
    ):
        assert (got.cpu() - wanted).norm() <= 1e-5 * wanted.norm()  # FP32 sums in another order, five layers


def test_bf16_on_a_gpu_keeps_fp32_weight_gradients():
    model = small_model("M-*-T", dtype=torch.bfloat16).cuda()
    tokens = random_tokens(2, 17).cuda()
    exact = loss_and_gradients(small_model("M-*-T").cuda(), tokens)
    for got, wanted in zip(loss_and_gradients(model, tokens), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() <= 16 * 2**-9 * wanted.norm() + 1e-6  # a few BF16 roundings per layer
