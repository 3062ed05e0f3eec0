"""Peers compute the same model: a plain one, and Hugging Face's, also with another package's scan."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from fourbits.bench.peers import mamba_ssm
from fourbits.bench.peers import model as model_peers
from fourbits.bench.peers.plain_transformer import PlainTransformer
from fourbits.exchange.hf import to_hf
from fourbits.model.lm import LanguageModel
from fourbits.train.config import RunConfig, TrainConfig
from model.shapes import random_tokens, small_config

CPU = torch.device("cpu")
TRITON, UPDATE = "mamba_ssm.ops.triton", "selective_state_update"
NAMES = {
    "attention.q_proj": "attention.q",
    "attention.k_proj": "attention.k",
    "attention.v_proj": "attention.v",
    "attention.o_proj": "attention.out",
    "ffn.up_proj": "up",
    "ffn.down_proj": "down",
}


def run_config(pattern: str, **changes) -> RunConfig:
    train = TrainConfig(steps=1, micro_batch_size=2, seq_len=16)
    return RunConfig(model=small_config(pattern, **changes), train=train)


def test_the_plain_transformer_is_ours_under_other_names():
    config = replace(small_config("TT", rope_theta=1e4), norm_eps=torch.finfo(torch.float32).eps)
    ours, plain = LanguageModel(config, compute_dtype=torch.bfloat16, seed=0), PlainTransformer(config)
    weights = {}
    for name, value in ours.state_dict().items():
        for own, theirs in NAMES.items():
            name = name.replace(own, theirs)
        weights[name] = value
    missing, unexpected = plain.load_state_dict(weights, strict=False)
    assert not missing
    assert all("norm" in name for name in unexpected)  # gains of one, which it does not have
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16)
    summed, count = ours.loss(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = plain(tokens, targets)
    # Logits of a fresh model are about 0.1, and BF16 errors are about a hundredth of them.
    assert abs(found - summed / count) < 2e-3


@pytest.mark.parametrize("pattern", ["TT", "M-*-"])
def test_transformers_own_class_is_timed(pattern):
    config = run_config(pattern, **({"rope_theta": 1e4} if pattern == "TT" else {}))
    run = model_peers.bench_peer("transformers", config, CPU, repeats=1)
    assert run.absent is None
    assert run.what.startswith("ArceeForCausalLM" if pattern == "TT" else "NemotronHForCausalLM")
    assert run.seconds is not None
    assert run.tokens_per_second == pytest.approx(32 / run.seconds)
    assert run.goal == 1.5


@pytest.mark.parametrize(
    ("name", "pattern", "why"),
    [
        ("transformers-mamba-ssm", "TT", "no Mamba layers"),
        ("transformers-mamba-ssm", "M-*-", "mamba_ssm's kernels cannot be imported"),
        ("plain-compiled", "M-*-", "is a Transformer"),
    ],
)
def test_an_unavailable_peer_gives_the_reason(name, pattern, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)  # unavailable, even if it is installed
    run = model_peers.bench_peer(name, run_config(pattern, rope_theta=None), CPU, repeats=1)
    assert run.absent is not None
    assert why in run.absent
    assert run.seconds is None


def test_another_packages_scan_replaces_transformers_own_and_is_counted(monkeypatch):
    from transformers.models.nemotron_h import modeling_nemotron_h as mixers

    own, given = mixers.mamba2_chunk_scan, []

    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, return_final_states=False
    ):
        given.append((x.shape, chunk_size, dt_softplus))
        options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        return own(x, dt, A, B, C, chunk_size, **options, return_final_states=return_final_states)

    def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
        return update(state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)

    update, parents = mixers.mamba2_selective_state_update, ("mamba_ssm", "mamba_ssm.ops", TRITON)
    modules = {name: ModuleType(name) for name in (*parents, f"{TRITON}.ssd_combined", f"{TRITON}.{UPDATE}")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(modules[f"{TRITON}.ssd_combined"])["mamba_chunk_scan_combined"] = mamba_chunk_scan_combined
    vars(modules[f"{TRITON}.{UPDATE}"])[UPDATE] = selective_state_update
    theirs = to_hf(LanguageModel(small_config("M-*M"), seed=0)).train()
    tokens = random_tokens(2, 16)
    wanted = theirs(tokens, use_cache=False).logits
    with mamba_ssm.mamba_kernels() as calls:
        found = theirs(tokens, use_cache=False).logits
    assert calls["mamba_chunk_scan_combined"] == len(given) == 2
    assert torch.equal(found, wanted)
    theirs.eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    written = theirs.generate(tokens, **options)
    with mamba_ssm.mamba_kernels() as calls:
        assert torch.equal(theirs.generate(tokens, **options), written)
    assert (calls["mamba_chunk_scan_combined"], calls[UPDATE]) == (2, 2 * 3)  # two layers, four tokens
    assert mixers.mamba2_chunk_scan is own
