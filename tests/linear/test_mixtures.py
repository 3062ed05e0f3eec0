"""Whole mixtures of transformers from a config: what is quantized runs, trains, and is restored."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers

from fourbits.linear.audit import audit
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from support.assertions import assert_same_bytes

hf: Any = transformers
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
FOUR = {"moe_intermediate_size": 48, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MAMBA = {
    "hybrid_override_pattern": "ME*E",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 4,
}


def _of(name: str, **more: Any) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        config = getattr(hf, f"{name}Config")(**{**SIZES, **FOUR, **more})
        return getattr(hf, f"{name}ForCausalLM")(config)

    return made


#: a model, and how many parameters hold the weights of its experts
MIXTURES: dict[str, tuple[Callable[[], Any], int]] = {
    "Mixtral": (_of("Mixtral"), 4),
    "Qwen3Moe": (_of("Qwen3Moe"), 4),
    "DeepseekV3": (_of("DeepseekV3", **MLA), 2),
    "GptOss": (_of("GptOss"), 4),
    "NemotronH": (_of("NemotronH", **MAMBA), 4),
}
TOKENS = torch.arange(2 * 24).reshape(2, 24) * 5 % 96


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_runs_what_the_summary_claims_and_is_restored(name):
    made, stacks = MIXTURES[name]
    model = made()
    keys, before = list(model.state_dict()), dict(model.named_parameters())
    logits = model(TOKENS).logits
    summary = convert(model, "nvfp4", keep_first=0, keep_last=0)
    quantized = {row.name for row in summary.rows if row.quantized}
    assert len([name for name in quantized if name in before]) == stacks
    assert not [row.name for row in summary.rows if "gate.weight" in row.name and row.quantized]
    set_step(model, 0)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        set_step(model, step)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        if step == 0:
            report = audit(model)
            assert (set(report.called), report.bypassed) == (quantized, ())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert list(model.state_dict()) == keys
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
    convert(model, "bf16")
    plain = made()
    plain.load_state_dict(model.state_dict())
    assert_same_bytes(model(TOKENS).logits, plain(TOKENS).logits)
    assert logits.shape == model(TOKENS).logits.shape


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_a_converted_mixture_has_as_many_graphs_as_a_plain_one(name):
    torch._dynamo.reset()
    model = MIXTURES[name][0]()
    model.set_experts_implementation("grouped_mm")
    plain = torch._dynamo.explain(model)(TOKENS, use_cache=False).graph_break_count
    convert(model, "nvfp4", keep_first=0, keep_last=0)
    set_step(model, 0)
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(TOKENS, use_cache=False).graph_break_count == plain == 0
