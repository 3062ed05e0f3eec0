"""A token whose gradient dwarfs all others is found and reported, and limited rows train through it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

from fourbits.linear import dominant_tokens
from fourbits.linear.audit import audit
from fourbits.linear.convert import convert
from fourbits.linear.dominant_tokens import lost_blocks_and_large_rows
from fourbits.linear.feature_shard import shard_features
from fourbits.linear.limited_rows import limited
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.families import HEADS, TOKENS

LIMITED = override(get_recipe("nvfp4"), {"gradient_rows": "limited"})


def gradient(large: float, tokens: int = 64) -> torch.Tensor:
    dy = torch.randn(tokens, 48).clamp(-2, 2)
    dy[3] *= large
    return dy


def test_the_shares_are_those_of_blocks_with_a_zero_scale_and_of_rows_near_the_amax():
    """A block's scale is zero below 2**-10 / 448 of the amax; here 63 of 64 rows lie there."""
    lost, rows = lost_blocks_and_large_rows(gradient(1e8)).tolist()
    assert (lost, rows) == (pytest.approx(63 / 64), pytest.approx(1 / 64))
    lost, rows = lost_blocks_and_large_rows(gradient(1)).tolist()
    assert (lost, rows) == (0, 1)


def test_rows_are_limited_to_16_times_the_typical_row_by_powers_of_two_and_others_keep_their_bits():
    dy = gradient(1e8)
    found, back = limited(dy)
    others = [i for i in range(len(dy)) if i != 3]
    assert_same_bytes(found[others], dy[others])
    assert found[3].abs().amax() <= 32 * dy[others].abs().amax()
    assert_same_bytes(found * back, dy)
    special = gradient(1)
    special[0], special[1], special[2, 0] = 0, float("nan"), float("inf")
    assert_same_bytes(limited(special)[0], special)


def gradients(model: nn.Module, recipe: str | Recipe) -> dict[str, torch.Tensor]:
    if recipe != "bf16":
        convert(model, recipe)
        set_step(model, 0)
    model.zero_grad()
    tokens = TOKENS.clone()
    tokens[:, 0] = 0
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def llama_config(sizes: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(**sizes)


def trapped() -> LlamaForCausalLM:
    """The first token's embedding is exact zeros, and pre-norm blocks multiply its gradient by 1000 each."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config({**HEADS, "pad_token_id": 0, "num_hidden_layers": 4}))


def norm(found: dict[str, torch.Tensor]) -> float:
    return torch.stack([gradient.norm() for gradient in found.values()]).norm().item()


def test_a_row_of_zeros_in_the_embedding_is_found_by_the_audit_and_by_the_first_step():
    model = trapped()
    gradients(model, "nvfp4")
    (finding,) = audit(model).gradients
    assert "a few tokens dominate the gradients" in finding
    assert "3.2% of the tokens" in finding
    with pytest.warns(UserWarning, match=r"padding_idx with a label.*gradient_rows: limited"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    usual = LlamaForCausalLM(llama_config({**HEADS, "pad_token_id": None}))
    gradients(usual, "nvfp4")
    assert audit(usual).gradients == ()


def test_it_is_found_in_a_compiled_model():
    torch._dynamo.reset()
    model = trapped()
    convert(model, "nvfp4")
    set_step(model, 0)
    tokens = TOKENS.clone()
    tokens[:, 0] = 0
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    (finding,) = audit(model).gradients
    assert "3.2% of the tokens" in finding
    with pytest.warns(UserWarning, match=r"padding_idx with a label"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    convert(model, "nvfp4")
    assert audit(model).gradients == ()  # another conversion has seen none yet
    convert(model, "bf16")


def test_the_first_backward_pass_is_inspected_without_breaking_or_recompiling_a_graph(
    monkeypatch,
):
    looks: list[torch.Tensor] = []

    def looked(dy: torch.Tensor) -> torch.Tensor:
        looks.append(dy)
        return lost_blocks_and_large_rows(dy)

    monkeypatch.setattr(dominant_tokens, "lost_blocks_and_large_rows", looked)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    convert(model, "nvfp4", stacks=[])
    graphs = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=graphs, fullgraph=True)
    for number in range(3):
        set_step(model, number)
        run(torch.randn(64, 32, requires_grad=True)).sum().backward()
        assert len(looks) == 2, "one look per layer"
    assert graphs.frame_count == 1


def test_limited_rows_give_the_gradients_of_bf16_where_nvfp4_loses_them():
    """Without limits the rotation of 16 tokens spreads the large row's error: a norm 100 times too large."""
    expected, plain, found = (gradients(trapped(), recipe) for recipe in ("bf16", "nvfp4", LIMITED))
    assert norm(plain) > 100 * norm(expected)
    assert norm(found) == pytest.approx(norm(expected), rel=0.1)
    quantized = [name for name in found if "layers.0" in name and "proj" in name]
    for name in quantized:
        assert torch.cosine_similarity(found[name].flatten(), expected[name].flatten(), dim=0) > 0.8, name


def test_limits_change_no_bit_where_no_row_is_large_and_no_hash_where_they_are_off():
    found, expected = (
        [step(nn.Sequential(nn.Linear(32, 48)), recipe) for recipe in (LIMITED, "nvfp4")]
    )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert_same_bytes(one, other)
    assert LIMITED.digest != get_recipe("nvfp4").digest
    assert get_recipe("nvfp4").digest == NVFP4


def step(model: nn.Module, recipe: str | Recipe) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(64, 32, generator=generator, requires_grad=True)
    convert(model, recipe)
    set_step(model, 0)
    model(x).backward(torch.randn(64, 48, generator=generator).clamp(-2, 2))
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient for gradient in gradients if gradient is not None]


def test_a_shard_by_features_does_not_see_whole_rows_and_refuses():
    layer = nn.Linear(32, 48)
    convert(layer, LIMITED)
    with pytest.raises(ValueError, match="shard_features: limits follow the rows of one shard"):
        shard_features(layer, first_out=16, amax_reduction="none")


def test_a_compiled_step_limits_rows_as_an_eager_one_does():
    dy, found = gradient(1e6), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48))
        convert(model, LIMITED)
        set_step(model, 0)
        x = torch.ones(64, 32, requires_grad=True)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).backward(dy)
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert_same_bytes(one, other)


#: the hash of runs from before the setting
NVFP4 = "2cb0b0fe22f75ccb"
