"""On a GPU a step replays a captured graph: the tokens are those of steps that were launched one by one."""

from typing import Any

import pytest
import torch

from fourbits.generate import decoder
from fourbits.generate.generate import generate
from fourbits.generate.sampling import Sampling
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8], [20, 21]]
SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "d_ffn": 256, "max_seq_len": 128}
OF_MAMBA: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 64, "state_size": 128, "num_groups": 4}


@pytest.mark.parametrize("pattern", ["M*M-", "TT"])
def test_replayed_steps_generate_what_launched_ones_do(monkeypatch, pattern):
    config = ModelConfig(vocab_size=384, d_model=256, pattern=pattern, **SIZES, **OF_MAMBA)
    model = LanguageModel(config).to("cuda")
    sampling = Sampling(temperature=1.0, seed=2)
    replayed = generate(model, PROMPTS, 60, sampling=sampling)
    monkeypatch.setattr(decoder, "WARMUP", 1000)
    assert generate(model, PROMPTS, 60, sampling=sampling) == replayed


@pytest.mark.parametrize("pattern", ["M*M-", "TT"])
@torch.no_grad()
def test_greedy_tokens_are_the_whole_passs_where_bf16_separates_the_first_two(pattern):
    config = ModelConfig(vocab_size=384, d_model=256, pattern=pattern, **SIZES, **OF_MAMBA)
    model = LanguageModel(config).to("cuda").eval()
    (ids,) = generate(model, [PROMPTS[2]], 60)
    logits = model(torch.tensor([PROMPTS[2] + ids], device="cuda"))[0, 7:-1].float()
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > 4 * 2**-8 * logits.abs().max()  # a unit in the last place each, twice
    assert clear.any()
    assert torch.equal(logits.argmax(-1)[clear], torch.tensor(ids, device="cuda")[clear])
