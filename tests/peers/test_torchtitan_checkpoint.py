"""A checkpoint that torchtitan's own Trainer saved, read without torchtitan: the logits of its model."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from fourbits.exchange.dcp.llama import load_dcp
from fourbits.model.config import ModelConfig, RopeScaling
from peers.test_torchtitan import one_process, trainer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:fourbits")]
titan = pytest.importorskip("support.titan")
assert one_process  # a fixture of this module, too

#: its debug model, of two blocks
CONFIG = ModelConfig(
    vocab_size=1,
    d_model=256,
    pattern="TT",
    d_ffn=768,
    activation="swiglu",
    num_heads=16,
    num_kv_heads=16,
    head_dim=16,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_seq_len=8192),
    norm_eps=1e-5,
)


def test_logits_are_those_of_the_model_that_was_saved(tmp_path):
    """In FP32, within 2^-14 of the largest: sums have other orders. The optimizer is in the folder, too."""
    trainer(tmp_path, "bf16").train()
    folder = tmp_path / "checkpoint" / f"step-{titan.STEPS}"
    model = titan.config(str(tmp_path)).model_spec.model.build()
    state = model.state_dict()
    load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    tokens = torch.randint(0, 64, (2, titan.SEQUENCE), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(titan.SEQUENCE).expand(2, -1).contiguous()
    with torch.no_grad():
        expected = model(tokens, positions=positions)
        found = load_dcp(folder, CONFIG, compute_dtype=torch.float32)(tokens)
    assert expected.dtype == torch.float32
    assert float((found - expected).abs().max()) < 2**-14 * float(expected.abs().max())
