"""Losses per source, bits per byte, and generated text."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fourbits.data.tokenizer import Tokenizer
from fourbits.evaluate import HeldOut, Loss, evaluate, total_loss, unigram_counts, unigram_entropy
from fourbits.model.lm import LanguageModel
from support.small_models import attention_model


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([Path(__file__).read_text()], 384)


@pytest.fixture
def model():
    return LanguageModel(attention_model(max_seq_len=24))


def samples(count, length=17):
    return np.random.default_rng(count).integers(0, 300, (count, length), dtype=np.int64)


def test_bits_per_byte_is_nats_over_ln2_and_bytes():
    assert Loss(nats=10 * math.log(2), tokens=4, num_bytes=5).bits_per_byte == pytest.approx(2.0, rel=1e-15)
    assert Loss(nats=10.0, tokens=4, num_bytes=5).per_token == 2.5


def test_bytes_are_those_of_the_predicted_text(tokenizer):
    text = "def bytes_of(text): return len(text)"
    ids = tokenizer.encode(text)
    held_out = HeldOut.of(np.array([[tokenizer.end_id, *ids]]), tokenizer)
    assert held_out.num_bytes == len(text)


def test_end_tokens_count_no_bytes(tokenizer):
    assert HeldOut.of(np.full((2, 5), tokenizer.end_id), tokenizer).num_bytes == 0


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_every_sample_counts_once_whatever_the_batch_size(model, tokenizer, batch_size):
    held_out = HeldOut.of(samples(5), tokenizer)
    with torch.no_grad():
        expected = float(model.loss(held_out.samples[:, :-1], held_out.samples[:, 1:])[0])
    loss = evaluate(model, {"text": held_out}, batch_size)["text"]
    assert loss.tokens == 5 * 16
    # Sums of 80 FP32 losses in another order.
    assert loss.nats == pytest.approx(expected, rel=80 * 2**-24)


def test_sources_are_weighed_by_their_tokens(model, tokenizer):
    parts = {"a": HeldOut.of(samples(1), tokenizer), "b": HeldOut.of(samples(3), tokenizer)}
    losses = evaluate(model, parts, 2)
    total = total_loss(losses.values())
    assert total.tokens == 64
    assert total.per_token == pytest.approx((losses["a"].nats + losses["b"].nats) / 64, rel=1e-15)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(model, tokenizer, training):
    model.train(training)
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(module.training))
    evaluate(model, {"text": HeldOut.of(samples(1), tokenizer)}, 1)
    assert set(seen) == {False}
    assert model.training is training


def test_uniform_counts_have_the_entropy_of_their_number():
    assert unigram_entropy([7] * 16 + [0] * 5) == pytest.approx(math.log(16), rel=1e-15)
    assert unigram_entropy([3, 0]) == 0.0


def test_long_texts_are_counted_on_evenly_spaced_parts():
    tokens = np.repeat(np.arange(4, dtype=np.uint16), 64 * 100)
    assert unigram_counts(tokens, 6).tolist() == [6400] * 4 + [0, 0]
    sampled = unigram_counts(tokens, 6, limit=64 * 10)
    assert sampled.sum() == 640
    assert sampled[:4].tolist() == pytest.approx([160] * 4, abs=10)
