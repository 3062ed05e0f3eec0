"""The cost of a recipe: losses, agreement and divergence of two forward passes over the same tokens."""

import numpy as np
import pytest
import torch

from fourbits.evaluate import HeldOut, evaluate
from fourbits.evaluation.cost import differences, total
from fourbits.generate.held import calibrate, in_use, recipe_layers
from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import recipe_from_mapping
from fourbits.train.ranks.ranks import Ranks
from support.small_models import attention_model

RECIPE = recipe_from_mapping({"base": "nvfp4", "keep_bf16": {"first_blocks": 0, "last_blocks": 0}}, "test")

ALONE = Ranks(torch.device("cpu"))


@pytest.fixture(scope="module")
def model():
    return LanguageModel(attention_model(vocab_size=128, init_std=0.3))


@pytest.fixture(scope="module")
def texts():
    rows = {name: np.random.default_rng(n).integers(0, 128, (n, 33)) for n, name in ((3, "a"), (5, "b"))}
    return {name: HeldOut(torch.from_numpy(row), 100 * len(row)) for name, row in rows.items()}


@pytest.fixture(scope="module")
def layers(model, texts):
    convert(model, RECIPE)
    found = recipe_layers(model)
    convert(model, "bf16")
    calibrate(model, found, [text.samples[:, :-1] for text in texts.values()])
    return found


def test_without_quantized_layers_nothing_differs(model, texts):
    for name, found in differences(model, [], texts, 2, ALONE).items():
        assert found.bf16 == found.quantized
        assert found.agreement == 1
        assert found.divergence == 0
        assert found.bf16.tokens == 32 * len(texts[name].samples)


def test_losses_are_those_of_each_forward_pass_alone(model, layers, texts):
    found = differences(model, layers, texts, 2, ALONE)
    plain = evaluate(model, texts, 2)
    with in_use(layers):
        quantized = evaluate(model, texts, 2)
    for name in texts:
        # the same logits, summed over tokens in FP32 in another order
        assert found[name].bf16.nats == pytest.approx(plain[name].nats, rel=2**-18)
        assert found[name].quantized.nats == pytest.approx(quantized[name].nats, rel=2**-18)
        assert found[name].bf16.nats != found[name].quantized.nats


def test_agreement_and_divergence_are_those_of_the_logits(model, layers, texts):
    found = differences(model, layers, texts, 4, ALONE)["a"]
    inputs = texts["a"].samples[:, :-1]
    with torch.no_grad():
        p = model(inputs).double().log_softmax(-1)
        with in_use(layers):
            q = model(inputs).double().log_softmax(-1)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert found.divergence > 0
    assert found.agreement < 1


def test_all_sources_together_count_each_token_once(model, layers, texts):
    parts = differences(model, layers, texts, 8, ALONE)
    every = total(parts)
    assert every.bf16.tokens == 8 * 32
    assert every.divergence == pytest.approx((3 * parts["a"].divergence + 5 * parts["b"].divergence) / 8)
    assert every.agreement == pytest.approx((3 * parts["a"].agreement + 5 * parts["b"].agreement) / 8)


def test_the_model_stays_in_bf16(model, layers, texts):
    before = model(texts["a"].samples[:, :-1])
    differences(model, layers, texts, 8, ALONE)
    assert torch.equal(model(texts["a"].samples[:, :-1]), before)
