"""Answers end at the first of their stops, and a batch ends when all of its answers have."""

import pytest

from fourbits.data.tokenizer import Tokenizer
from fourbits.generate.generate import generate
from fourbits.generate.sampling import Sampling
from fourbits.harness import text_model as module
from fourbits.harness.text_model import TextModel, until
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

TEXT = "Question: how many blocks? Answer: sixteen codes and one scale. "


@pytest.fixture(scope="module")
def text_model():
    tokenizer = Tokenizer.train([TEXT * 50], 384)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=16,
        pattern="*",
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        max_seq_len=160,
    )
    return TextModel(LanguageModel(config), tokenizer, (tokenizer.end_id,), batch_size=2)


def answers(text_model, stops, num_tokens=64):
    texts = ["Question: how", "Answer", "one scale"]
    return text_model.continued(texts, num_tokens, [stops] * 3, Sampling(temperature=1.0, seed=1))


def test_an_answer_ends_before_its_first_stop_and_is_otherwise_the_same(text_model):
    whole, _ = answers(text_model, [])
    assert min(map(len, whole)) > 20
    stops = [whole[0][9:11], whole[1][5:8]]
    found, _ = answers(text_model, stops)
    assert found == [until(text, stops) for text in whole]
    assert len(found[0]) <= 9
    assert len(found[1]) <= 5


def test_a_batch_ends_when_all_its_answers_have(text_model, monkeypatch):
    whole, _ = answers(text_model, [])
    looks: list[int] = []

    def watched(*args, is_done, **options):
        def noted(index, tokens):
            looks.append(len(tokens))
            return is_done(index, tokens)

        return generate(*args, is_done=noted, **options)

    monkeypatch.setattr(module, "generate", watched)
    text_model.continued(["Question: how"], 64, [[whole[0][2:5]]], Sampling(temperature=1.0, seed=1))
    assert looks == [16]


def test_prompts_that_do_not_fit_lose_their_beginning_and_are_counted(text_model):
    long, known = TEXT * 40, text_model.tokenizer
    found, cut = text_model.continued([long], 4096, [[]], Sampling())
    assert cut == 1
    (tokens,) = generate(
        text_model.model, [known.encode(long)[-80:]], 80, end=known.end_id, num_ids=known.size
    )
    assert found == [known.decode(tokens)]


def test_until_takes_the_earliest_of_all_stops():
    assert until("one two three", ["three", "two"]) == "one "
    assert until("one", ["", "two"]) == "one"
