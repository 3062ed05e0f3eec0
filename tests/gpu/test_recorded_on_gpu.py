"""What a training step quantized on a GPU, quantized again on the CPU: equal bytes.

The inputs of every call of a quantizer in one step of a small hybrid are recorded on the GPU, with the specs
and the keys of their random bits.
"""

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fourbits import convert, set_step
from fourbits.linear import plan
from fourbits.model.lm import LanguageModel
from fourbits.quant.quantize import exact_operand, quantizer
from fourbits.quant.request import OperandInputs, OperandRequest
from fourbits.quant.tensor import ExactOperand
from model.shapes import small_config

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


class Made(NamedTuple):
    """One operand that a quantizer made, all of it on the CPU."""

    x: Tensor
    request: OperandRequest
    key: Tensor | None
    values: Tensor
    scale: Tensor


def recorded(x: Tensor, request: OperandRequest, inputs: OperandInputs, operand: object) -> Made:
    assert isinstance(operand, ExactOperand)
    key = None
    if inputs.counter is not None:
        key = inputs.counter[list(request.key_fields)].cpu()
        key[1] += inputs.stream
    if inputs.factor is not None:
        x = x.to(torch.float32) * inputs.factor
    values = operand.values[: x.shape[0], : x.shape[1]].to(torch.bfloat16).cpu()
    return Made(x.detach().cpu(), request, key, values, operand.scale.cpu())


@pytest.fixture
def seen(monkeypatch):
    """The operands that all quantizers of linear layers make from here on."""
    found: list[Made] = []

    @functools.cache
    def recording(signature, requests):
        make = quantizer(signature, requests)

        def quantize(x, inputs, stats):
            operands = make(x, inputs, stats)
            found.extend(map(recorded, [x] * len(requests), requests, inputs, operands))
            return operands

        return quantize

    monkeypatch.setattr(plan, "quantizer", recording)
    plan.linear_plan.cache_clear()
    yield found
    plan.linear_plan.cache_clear()


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "fp8", "nvfp4-46", "quartet2-46"])
def test_inputs_of_a_step_quantize_to_the_same_bytes_on_the_cpu(recipe, seen):
    model = LanguageModel(small_config("M-*T"), seed=0).to(GPU)
    convert(model, recipe)
    set_step(model, 5, first_token=64)
    samples = torch.randint(64, (2, 33), device=GPU)
    model.loss(samples[:, :-1], samples[:, 1:])[0].backward()
    assert len(seen) >= 20
    for x, request, key, values, scale in seen:
        true = exact_operand(x, request.spec, request.axis, sr_key=key)
        assert torch.equal(values, true.values[: x.shape[0], : x.shape[1]].to(torch.bfloat16))
        assert torch.equal(scale, true.scale)
