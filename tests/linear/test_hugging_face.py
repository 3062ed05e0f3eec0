"""convert on models of transformers: every linear that it says is quantized runs, and none is bypassed."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.nemotron_h import modeling_nemotron_h

from exchange.exchanged import MAMBA, SIZES
from fourbits.linear.convert import convert
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import set_step

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_hidden_layers=2)
    ),  # its q, k and v have biases
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=16)),
    "nemotron-h": lambda: NemotronHForCausalLM(NemotronHConfig(**SIZES, **MAMBA)),
}
# What is not the head: of two Transformer blocks, and of one Mamba, one attention and two FFN blocks.
LINEARS = dict.fromkeys(MODELS, 2 * 7) | {"nemotron-h": 2 + 4 + 2 * 2}
TOKENS = torch.arange(64).reshape(2, 32) * 5 % 64


def ran(model: nn.Module) -> set[str]:
    """Names of the quantized linears whose forward a training step calls."""
    called: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_hook(lambda _m, _i, _o, name=name: called.add(name))
    model.train()
    set_step(model, 0)
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return called


@pytest.fixture
def plain_mamba(monkeypatch):
    """As on a machine without mamba_ssm, whatever is installed here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("plain_mamba")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_runs_every_linear_that_was_converted(name):
    model = MODELS[name]()
    before, logits = dict(model.named_parameters()), model(TOKENS).logits
    summary = convert(model, "nvfp4-naive")
    quantized = {row.name for row in summary.rows if row.quantized}
    assert len(quantized) == LINEARS[name]
    assert ran(model) == quantized
    for key, parameter in model.named_parameters():
        assert parameter is before[key]
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key
    assert not torch.equal(model(TOKENS).logits, logits)
    convert(model, "bf16")
    assert torch.equal(model(TOKENS).logits, logits)


def test_experts_in_one_parameter_are_quantized_and_their_router_stays():
    config = MixtralConfig(**SIZES, num_hidden_layers=1, num_local_experts=4)
    summary = convert(MixtralForCausalLM(config), "nvfp4-naive")
    kept = {row.name.rpartition("layers.0.")[2]: row.reason for row in summary.rows if not row.quantized}
    assert kept == {"lm_head": "output head or embedding", "mlp.gate.weight": "router"}
    assert summary.share_of_linears == 12 / 14, "two groups of four experts are eight linear layers"


def fused_kernel(projected, *_args, outproj_weight, **_kwargs):
    """Stands for mamba_ssm's: it multiplies by out_proj's weight itself."""
    inner = outproj_weight.shape[1]
    return projected[..., :inner] @ outproj_weight.T


def test_a_projection_that_a_fused_kernel_multiplies_by_is_kept_and_named(monkeypatch):
    """With mamba_ssm a training step never calls out_proj, which, converted, would compute in BF16 unseen."""
    monkeypatch.setattr(modeling_nemotron_h, "mamba2_split_conv1d_scan_combined", fused_kernel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "mamba_ssm" else None)
    model: Any = MODELS["nemotron-h"]()
    called: list[str] = []
    model.model.layers[0].mixer.out_proj.register_forward_hook(lambda *_: called.append("out_proj"))
    summary = convert(model, "nvfp4-naive")
    quantized = {row.name for row in summary.rows if row.quantized}
    assert ran(model) == quantized
    assert not called, "the kernel went past the module, as it does on a GPU"
    reason = "a fused kernel of NemotronHMamba2Mixer reads this weight directly"
    kept = {row.name: row.reason for row in summary.rows if not row.quantized}
    assert kept == {"lm_head": "output head or embedding", "model.layers.0.mixer.out_proj": reason}
    assert f"1 linear layer  bf16     {reason}" in str(summary)
