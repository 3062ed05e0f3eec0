"""A pass with a cache gives the logits of the whole pass, for every kind of layer and any padding."""

from typing import Any

import pytest
import torch

from fourbits.generate.cache import empty_cache
from fourbits.generate.forward import read_prompts, read_token
from fourbits.generate.mamba import final_state
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.model.ops.ssd import reference

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_ffn": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "state_size": 16,
    "num_groups": 2,
    "max_seq_len": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"pattern": "M*M-"},
    "transformer": {"pattern": "TT", "rope_theta": 1e4, "qk_norm": True, "activation": "swiglu"},
    "documents": {"pattern": "M*-T", "document_end": 3, "rope_theta": 1e4},
    "window": {"pattern": "TT", "sliding_window": 5, "rope_theta": 1e4},
    "mamba": {"pattern": "M-", "min_time_step": 0.01},
}
LENGTHS, LONGEST, TOKENS = torch.tensor([4, 11, 16]), 16, 24


def model_of(kind, dtype):
    model = LanguageModel(ModelConfig(**SIZES, **MODELS[kind]), compute_dtype=dtype, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # logits of about 1, so that errors are seen
    return model


def tokens_of_three():
    tokens = torch.randint(4, 64, (3, TOKENS))
    tokens[1, 10] = tokens[0, 5] = tokens[2, 15] = tokens[2, 3] = (
        3  # document ends: at a prompt's end, after it
    )
    return tokens


@torch.no_grad()
def both(model, tokens):
    """Logits of the whole pass and of the pass with a cache, at the last token of the prompt and 8 more."""
    whole, rows = model(tokens), torch.arange(3)
    cache = empty_cache(model, 3, TOKENS)
    found = [read_prompts(model, tokens[:, :LONGEST], LENGTHS, cache)]
    expected, place = [whole[rows, LENGTHS - 1]], LENGTHS.clone()
    for _ in range(TOKENS - LONGEST):
        found.append(read_token(model, tokens[rows, place], cache))
        expected.append(whole[rows, place])
        place += 1
    return torch.stack(found), torch.stack(expected)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_differ_from_the_whole_pass_by_fp32_sums_in_another_order(kind):
    model = model_of(kind, torch.float32)
    found, expected = both(model, tokens_of_three())
    # up to five blocks and a head, whose sums of at most 64 terms each add sqrt(64) 2^-24 of a few units
    bound = 6 * 8 * 2**-24 * 4
    assert (found - expected).abs().max() <= bound
    assert expected.std() > 0.05


@pytest.mark.parametrize("kind", MODELS)
def test_the_most_likely_token_is_that_of_the_whole_pass_where_bf16_separates_the_first_two(kind):
    found, expected = both(model_of(kind, torch.bfloat16), tokens_of_three())
    bound = 2 * 2**-8 * expected.abs().max()  # a unit in the last place on either side
    assert (found - expected).abs().max() <= bound
    best = expected.float().topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 2 * bound
    assert clear.any()
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("kind", MODELS)
def test_padding_has_no_effect(kind):
    model, tokens = model_of(kind, torch.float32), tokens_of_three()
    caches = []
    for fill in (7, 50):
        padded = tokens[:, :LONGEST].clone()
        padded[torch.arange(LONGEST) >= LENGTHS[:, None]] = fill
        cache = empty_cache(model, 3, TOKENS)
        with torch.no_grad():
            logits = [read_prompts(model, padded, LENGTHS, cache)]
            logits.append(read_token(model, torch.tensor([5, 6, 7]), cache))
        caches.append(torch.stack(logits))
    assert torch.equal(*caches)


@pytest.mark.parametrize("length", [1, 3, 256, 257, 600])
def test_the_state_after_a_prompt_is_the_recurrences(length):
    x, dt = torch.randn(2, length, 4, 8), torch.rand(2, length, 4) * 0.2
    a, b = -torch.rand(4) - 0.1, torch.randn(2, length, 2, 16)
    state = final_state(x, dt, a, b)
    # one more token with c = e_n, dt = 0 and d = 0 reads column n of the state
    exact = [t.double() for t in (x, dt, a, b)]
    rows = []
    for n in range(16):
        extra = [torch.cat((t, torch.zeros_like(t[:, :1])), 1) for t in (exact[0], exact[1], exact[3])]
        c = torch.zeros_like(extra[2])
        c[:, -1, :, n] = 1
        rows.append(reference.ssd(extra[0], extra[1], exact[2], extra[2], c, torch.zeros(4).double())[:, -1])
    expected = torch.stack(rows, dim=-1)
    # sums of `length` FP32 terms of both signs, by their magnitudes
    assert (state - expected).abs().max() <= 2**-22 * (length**0.5 + 4) * x.abs().max() * b.abs().max()
