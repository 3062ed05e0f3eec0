"""Texts are continued in batches; what is generated depends on the text alone, not on its batch."""

from typing import Any

import pytest
import torch

from fourbits.generate.decoder import ready
from fourbits.generate.generate import generate
from fourbits.generate.held import held_operands
from fourbits.generate.sampling import Sampling, chosen
from fourbits.generate.text import TextStream
from fourbits.linear.convert import convert
from fourbits.model.linear import Linear
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import recipe_from_mapping
from support.small_models import hybrid_model

PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8], [20, 21]]
DRAWN = Sampling(temperature=1.0, seed=3)


@pytest.fixture
def model():
    return LanguageModel(hybrid_model(max_seq_len=80))


def test_greedy_text_has_the_most_likely_token_each_time(model):
    (ids,) = generate(model, [[5, 6, 7]], 6)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *ids]]))[0, 2:-1]
    assert logits.argmax(-1).tolist() == ids


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_texts_do_not_depend_on_the_batch_and_keep_their_order(model, batch_size):
    alone = [generate(model, [prompt], 20, sampling=Sampling(seed=3))[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, 20, sampling=Sampling(seed=3), batch_size=batch_size) == alone


def test_draws_are_a_function_of_seed_and_text(model):
    first, again = (generate(model, PROMPTS, 12, sampling=DRAWN) for _ in range(2))
    other = generate(model, PROMPTS, 12, sampling=Sampling(temperature=1.0, seed=4))
    assert first == again != other
    assert generate(model, PROMPTS, 12, sampling=DRAWN, batch_size=1) == first


def test_a_text_ends_before_its_end_token_and_others_go_on(model):
    whole = generate(model, PROMPTS, 30, sampling=DRAWN)
    end = whole[2][7]
    cut = generate(model, PROMPTS, 30, sampling=DRAWN, end=end)
    for before, after in zip(whole, cut, strict=True):
        assert after == (before[: before.index(end)] if end in before else before)
    assert any(len(after) == 30 for after in cut)


def test_tokens_beyond_the_tokenizers_vocabulary_are_never_generated(model):
    assert max(generate(model, [[5]], 60, sampling=DRAWN)[0]) >= 8
    assert max(generate(model, [[5]], 60, sampling=DRAWN, num_ids=8)[0]) < 8


def test_tokens_arrive_one_by_one_and_are_those_returned(model):
    seen = {index: [] for index in range(len(PROMPTS))}
    found = generate(model, PROMPTS, 9, on_token=lambda index, token: seen[index].append(token))
    assert list(seen.values()) == found


@pytest.mark.parametrize(
    ("prompts", "num_tokens", "message"),
    [
        ([[1], []], 1, "prompt 1 must have at least one token"),
        ([[1, 384]], 1, "below the model's vocab_size = 384, got 384 in prompt 0"),
        ([[1] * 70], 11, "at most max_seq_len = 80 tokens, got 70 \\+ 11"),
        ([[1]], -1, "num_tokens must be at least 0"),
    ],
)
def test_prompts_that_the_model_cannot_continue_are_refused(model, prompts, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, num_tokens)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be in"),
    ],
)
def test_sampling_out_of_range_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**setting)


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.1, 0.25, 0.15])
    draws = (torch.arange(1000) + 0.5) / 1000  # every thousandth once
    found = chosen(probabilities.log().expand(1000, 4), draws, Sampling(temperature=1.0))
    assert torch.bincount(found, minlength=4).tolist() == [500, 100, 250, 150]


@pytest.mark.parametrize(
    ("sampling", "counts"),
    [
        (Sampling(temperature=1.0, top_k=2), [667, 0, 333, 0]),
        (Sampling(temperature=1.0, top_p=0.7), [667, 0, 333, 0]),
        (Sampling(temperature=1.0, top_p=0.4), [1000, 0, 0, 0]),
        (Sampling(temperature=0.5), [725, 29, 181, 65]),  # squares over their sum, 0.345
    ],
)
def test_top_k_top_p_and_temperature_redistribute_the_probabilities(sampling, counts):
    probabilities = torch.tensor([0.5, 0.1, 0.25, 0.15])
    draws = (torch.arange(1000) + 0.5) / 1000
    found = torch.bincount(chosen(probabilities.log().expand(1000, 4), draws, sampling), minlength=4)
    assert (found - torch.tensor(counts)).abs().max() <= 1


def test_masters_are_rounded_once_inside_and_restored_after(model):
    with ready(model):
        assert all(module._rounded is not None for module in model.modules() if type(module) is Linear)
        assert not model.training
    assert all(module._rounded is None for module in model.modules() if type(module) is Linear)
    assert model.training


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-46", "mxfp4"])
def test_with_held_amaxes_a_quantized_models_texts_do_not_depend_on_their_batch(model, recipe):
    convert(model, recipe, keep_first=0, keep_last=0)
    batches = [torch.randint(0, 384, (2, 16))]
    with held_operands(model, batches) as layers:
        assert layers == 8  # in_proj and out_proj, four of attention, two of the FFN
        alone = [generate(model, [prompt], 20)[0] for prompt in PROMPTS]
        assert generate(model, PROMPTS, 20) == alone


def test_held_layers_have_the_logits_of_the_quantized_forward_pass_on_what_was_calibrated(model):
    convert(model, "nvfp4", keep_first=0, keep_last=0)
    model.eval()
    tokens = torch.randint(0, 384, (2, 16))
    with torch.no_grad():
        expected = model(tokens)
        with held_operands(model, [tokens]):
            assert torch.equal(model(tokens), expected)
        assert torch.equal(model(tokens), expected)


def test_a_forward_pass_that_rounds_stochastically_is_refused(model):
    recipe = recipe_from_mapping({"base": "nvfp4", "fprop": {"lhs": {"rounding": "sr"}}}, "test")
    convert(model, recipe, keep_first=0, keep_last=0)
    with (
        pytest.raises(ValueError, match=r"fprop\.lhs of blocks\.0.* must round to nearest"),
        held_operands(model, [torch.ones(1, 4, dtype=torch.int64)]),
    ):
        pass


def test_calibration_needs_a_batch(model):
    convert(model, "nvfp4")
    with pytest.raises(ValueError, match="at least one batch"), held_operands(model, []):
        pass


def test_characters_of_several_tokens_appear_when_complete():
    class Bytes:
        def decode(self, tokens):
            return bytes(tokens).decode(errors="replace")

    words: Any = Bytes()
    stream = TextStream(words)
    text = "n\u00e9\u2192x".encode()
    pieces = [stream.add(byte) for byte in text]
    assert "".join(pieces) == "n\u00e9\u2192x"
    assert pieces == ["n", "", "\u00e9", "", "", "\u2192", "x"]
    assert stream.rest() == ""
    stream.add(0xC3)
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"
