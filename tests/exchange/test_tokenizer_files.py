"""An exported folder is whole: transformers loads model and tokenizer, pads a batch, and generates."""

import json
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from exchange.exchanged import NAMES, logits, ours
from fourbits.data.tokenizer import Tokenizer
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.exchange.hf import to_hf
from fourbits.model.lm import LanguageModel

TEXT = ["the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 8]
PROMPTS = ["the lazy fox", "dog", "the quick brown dog jumps over"]
TEXTS = [
    *PROMPTS,
    "",
    "  two\tspaces\n\n",
    "Zw\u00f6lf Boxk\u00e4mpfer \u65e5\u672c \U0001f642",
    "a<|endoftext|>b",
    "n'est, don't",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.train(TEXT, 384)
    assert made.size + 20 < made.vocab_size == 384, "a vocabulary without padding would prove nothing"
    return made


def exported(name: str, tokenizer: Tokenizer, folder, **changes) -> LanguageModel:
    """A model of which padding of the vocabulary has the largest logits; in the folder, in FP32."""
    model = ours(name, vocab_size=tokenizer.vocab_size, **changes)
    with torch.no_grad():
        model.head.weight[tokenizer.size :].normal_(std=10)  # 50 times that of the other rows
    save_hf(model.state_dict(), model.config, folder, dtype=torch.float32, tokenizer=tokenizer)
    return model


def greedy(model: LanguageModel, prompt: list[int], count: int, size: int) -> list[int]:
    """The likeliest continuation among the tokens of the tokenizer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, torch.tensor([tokens]))[0, -1, :size].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_batch_continues_as_each_prompt_does_here(name, tied, tokenizer, tmp_path):
    model = exported(name, tokenizer, tmp_path, tie_embeddings=tied)
    words: Any = AutoTokenizer.from_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = words(PROMPTS, return_tensors="pt", padding=True)
    assert not batch["attention_mask"].all(), "prompts of one length would need no padding"
    found = loaded.generate(**batch, max_new_tokens=10, do_sample=False)[:, batch["input_ids"].shape[1] :]
    seen = set[int]()
    for row, text in zip(found.tolist(), PROMPTS, strict=True):
        wanted = greedy(model, tokenizer.encode(text), 10, tokenizer.size)
        assert tokenizer.end_id not in wanted, "the text would end early and prove little"
        assert row == wanted
        assert words.decode(row) == tokenizer.decode(wanted)
        seen |= set(row)
    assert len(seen) > 3, "a constant text would prove little"
    assert logits(model, torch.tensor([[1]]))[0, -1].argmax() >= tokenizer.size, "padding would win"


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_that_is_loaded_gives_the_tokens_of_training(name, tokenizer, tmp_path):
    exported(name, tokenizer, tmp_path)
    words: Any = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = words(text, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text)
        assert words.decode(ids) == text
    assert (words.eos_token_id, words.pad_token_id) == (tokenizer.end_id, tokenizer.end_id)
    assert (words.bos_token_id, words.padding_side, words.model_max_length) == (None, "left", 8192)


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_has_a_row_for_every_token_and_no_more(name, tokenizer, tmp_path):
    model = exported(name, tokenizer, tmp_path)
    back = load_hf(tmp_path, compute_dtype=torch.float32)
    assert back.config.vocab_size == tokenizer.size
    for found, wanted in ((back.embed.weight, model.embed.weight), (back.head.weight, model.head.weight)):
        assert torch.equal(found, wanted[: tokenizer.size])
    tokens = torch.tensor([tokenizer.encode(TEXT[0])])
    assert torch.equal(logits(back, tokens), logits(model, tokens)[..., : tokenizer.size])


@pytest.mark.parametrize("name", NAMES)
def test_the_token_that_pads_is_trained_where_it_has_a_label(name, tokenizer, tmp_path):
    """transformers would not train the row of a pad_token_id in config.json, and would start it at zero."""
    exported(name, tokenizer, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.pad_token_id is None
    assert loaded.config.eos_token_id == tokenizer.end_id
    assert loaded.generation_config.eos_token_id == loaded.generation_config.pad_token_id == tokenizer.end_id
    table = loaded.get_input_embeddings()
    assert table.weight[tokenizer.end_id].count_nonzero() == table.weight.shape[1]
    tokens = torch.tensor([[5, 6, tokenizer.end_id, 7, 8]])
    loaded(tokens, labels=tokens).loss.backward()
    assert table.weight.grad[tokenizer.end_id].norm() > 0


def test_tokens_around_a_text_that_training_did_not_add_are_not_exported(tokenizer, tmp_path):
    inner = tokenizers.Tokenizer.from_str(tokenizer.serialized().decode())
    inner.add_special_tokens(["<s>", "<pad>"])
    start: Any = inner.token_to_id("<s>")
    template: Any = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    inner.post_processor = template
    own = Tokenizer(inner)
    assert inner.encode("the dog").ids[0] == start
    assert own.size == tokenizer.size + 2
    exported("llama", own, tmp_path)
    words: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert words("the dog")["input_ids"] == own.encode("the dog")
    # Its own padding token pads, so that labels of the end token need not be masked with the padding.
    assert (words.pad_token, words.eos_token) == ("<pad>", "<|endoftext|>")
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": own.end_id, "pad_token_id": inner.token_to_id("<pad>")}


def test_without_a_tokenizer_the_rows_stay_and_the_end_token_pads(tmp_path):
    model = ours("llama")
    save_hf(model.state_dict(), model.config, tmp_path, end_token=3)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.vocab_size, loaded.config.pad_token_id) == (64, None)
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (3, 3)
    there = to_hf(model, end_token=3)
    assert (there.generation_config.eos_token_id, there.generation_config.pad_token_id) == (3, 3)
    # Another model's end token does not stay behind.
    save_hf(model.state_dict(), model.config, tmp_path)
    assert not (tmp_path / "generation_config.json").exists()


def test_a_tokenizer_of_another_model_is_refused(tokenizer, tmp_path):
    model = ours("llama")
    with pytest.raises(ValueError, match=rf"at most the model's 64 tokens, got {tokenizer.size}"):
        save_hf(model.state_dict(), model.config, tmp_path, tokenizer=tokenizer)
    model = ours("llama", vocab_size=384)
    with pytest.raises(ValueError, match=rf"end_token must be the tokenizer's, {tokenizer.end_id}, got 7"):
        save_hf(model.state_dict(), model.config, tmp_path, tokenizer=tokenizer, end_token=7)
    assert not list(tmp_path.iterdir())
