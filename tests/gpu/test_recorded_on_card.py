"""What a training step quantized on a card, quantized again on the CPU: equal bytes.

The inputs of every call of a quantizer in one step of a small hybrid are recorded on the card, with the specs
and the keys of their random bits.
"""

import pytest
import torch

from fourbits import convert, set_step
from fourbits.linear import operands
from fourbits.model.lm import LanguageModel
from fourbits.quant.quantize import exact_operand
from model.shapes import small_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "fp8", "nvfp4-46", "quartet2-46"])
def test_inputs_of_a_step_quantize_to_the_same_bytes_on_the_cpu(recipe, monkeypatch):
    seen = []
    fused = operands.fused_operands

    def recording(x, wanted):
        made = fused(x, wanted)
        for want, operand in zip(wanted, made, strict=True):
            key = None
            if want.key is not None:
                key = want.key.entries[list(want.key.fields)].cpu()
                key[1] += want.key.stream
            values = operand.values[: x.shape[0], : x.shape[1]].to(torch.bfloat16).cpu()
            seen.append((x.cpu(), want.spec, want.axis, key, values, operand.scale.cpu()))
        return made

    monkeypatch.setattr(operands, "fused_operands", recording)
    model = LanguageModel(small_config("M-*T"), seed=0).cuda()
    convert(model, recipe)
    set_step(model, 5, first_token=64)
    samples = torch.randint(64, (2, 33), device="cuda")
    model.loss(samples[:, :-1], samples[:, 1:])[0].backward()
    assert len(seen) >= 20
    for x, spec, axis, key, values, scale in seen:
        true = exact_operand(x, spec, axis, sr_key=key)
        assert torch.equal(values, true.values[: x.shape[0], : x.shape[1]].to(torch.bfloat16))
        assert torch.equal(scale, true.scale)
