"""transformers computes the same with our weights, and our model with theirs."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from exchange.exchanged import NAMES, assert_same_logits, logits, ours, theirs
from fourbits.exchange.hf import from_hf, to_hf
from fourbits.exchange.weights import fill
from model.shapes import random_tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_with_our_weights(name, tied):
    model = ours(name, tie_embeddings=tied)
    there = to_hf(model)
    assert not there.training
    assert_same_logits(there, model, random_tokens(2, 21))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_our_model_computes_the_same_with_their_weights(name, tied):
    model = theirs(name, tie_word_embeddings=tied)
    found = from_hf(model, compute_dtype=torch.float32)
    assert_same_logits(found, model, random_tokens(2, 21))
    # transformers' NemotronH has two tables whatever its configuration says.
    assert (found.head.weight is found.embed.weight) == (tied and name != "hybrid")
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_export_and_import_change_no_bit(name):
    model = ours(name)
    back = from_hf(to_hf(model), compute_dtype=torch.float32)
    assert back.config == model.config
    for ours_, theirs_ in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert ours_[0] == theirs_[0]
        assert torch.equal(ours_[1], theirs_[1])


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_both_are_equally_far_from_fp32(name):
    model, tokens = ours(name), random_tokens(4, 32)
    wanted = logits(model, tokens)
    there = to_hf(model, dtype=torch.bfloat16)
    here = from_hf(there)  # computes in BF16, from weights rounded to BF16
    errors = [(logits(m, tokens) - wanted).norm() / wanted.norm() for m in (there, here)]
    # Two samples of one kind of noise: transformers rounds in more places (it adds the gains in BF16).
    assert errors[1] <= 1.5 * errors[0]
    assert 0 < (logits(there, tokens) - logits(here, tokens)).norm() <= 2 * errors[0] * wanted.norm()


def test_rotary_frequencies_of_an_exported_bf16_model_stay_fp32():
    """An angle of 2047 radians, rounded to BF16, would be off by several."""
    model = to_hf(ours("llama"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    wanted = to_hf(ours("llama")).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, wanted)
    assert wanted.dtype == torch.float32


def test_time_steps_are_clamped_as_in_transformers_unless_disabled():
    model, tokens = theirs("hybrid"), random_tokens(2, 21)
    assert model.config.time_step_min == 0.001
    clamped = from_hf(model, compute_dtype=torch.float32)
    assert clamped.config.min_time_step == 0.001
    free = from_hf(model, compute_dtype=torch.float32, clamp_time_steps=False)
    assert free.config.min_time_step == 0
    # Several times what equality allows, or the test would prove nothing.
    assert (logits(free, tokens) - logits(clamped, tokens)).norm() >= 5e-5 * logits(clamped, tokens).norm()
    for model in (clamped, free):
        assert_same_logits(to_hf(model), model, tokens)


def test_the_older_prefix_is_read_too():
    model = theirs("hybrid")
    found = from_hf(model, compute_dtype=torch.float32)
    state = {name.replace("model.", "backbone.", 1): value for name, value in model.state_dict().items()}
    assert any(name.startswith("backbone.layers.0.mixer") for name in state)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.fill_(float("nan"))
    fill(found, state)
    assert_same_logits(found, model, random_tokens(2, 21))


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"model_type must be one of nemotron_h, .*, got 'gpt2'"):
        from_hf(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=1)))
    with pytest.raises(ValueError, match="from_hf: model must be a transformers model, got Linear"):
        from_hf(torch.nn.Linear(2, 2))


def test_a_separate_head_with_a_configuration_that_ties_it_is_refused():
    """transformers computes with both tables then."""
    model = ours("llama", tie_embeddings=True)
    state = dict(to_hf(model).state_dict())
    fill(model, state)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"'lm_head.weight' must be equal to 'model.embed_tokens.weight'"):
        fill(model, state)


def test_a_model_on_the_meta_device_is_imported_on_the_meta_device():
    with torch.device("meta"):
        found = from_hf(theirs("llama", tie_word_embeddings=True))
    assert found.head.weight is found.embed.weight
    assert found.embed.weight.is_meta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("lm_head.weight"),
            r"'lm_head.weight' is missing \(here it is called 'head.weight'\)",
        ),
        (lambda s: s.update({"model.norm.weight": torch.ones(3)}), r"must have the shape \[48\].*got \[3\]"),
        (lambda s: s.update({"model.bias": torch.ones(3)}), "'model.bias' is not a parameter of this model"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    model = ours("llama")
    state = dict(to_hf(model).state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        fill(model, state)


def test_derived_tensors_in_older_llamas_are_ignored():
    model = ours("llama")
    state = dict(to_hf(model).state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    fill(model, state)
