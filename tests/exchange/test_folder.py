"""Folders that we write are read by transformers, with the same generated text, and the reverse."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from exchange.exchanged import NAMES, assert_same_logits, logits, ours, theirs
from fourbits.data.tokenizer import Tokenizer
from fourbits.exchange import folder
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.model.lm import LanguageModel
from model.shapes import random_tokens

TEXT = ["the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 8]


def greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_generates_the_same_greedy_text_in_transformers(name, tmp_path):
    tokenizer = Tokenizer.train(TEXT, 384)
    model = ours(name, vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.head.weight[tokenizer.size :] = 0  # padding of the vocabulary decodes to no text
    save_hf(model.state_dict(), model.config, tmp_path, dtype=torch.float32, end_token=tokenizer.end_id)
    tokenizer.save(tmp_path / "tokenizer.json")

    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    words = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    prompt = words("the lazy fox", return_tensors="pt")["input_ids"]
    assert prompt[0].tolist() == tokenizer.encode("the lazy fox")
    ids = loaded.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()

    wanted = greedy(model, prompt[0].tolist(), 24)
    assert tokenizer.end_id not in wanted, "the text would end early and prove little"
    assert len(set(wanted[-24:])) > 3, "a constant text would prove little"
    assert ids == wanted
    assert words.decode(ids) == tokenizer.decode(wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_several_files_is_read_by_both_without_losing_a_bit(name, tied, tmp_path):
    model = ours(name, tie_embeddings=tied)
    save_hf(model.state_dict(), model.config, tmp_path, dtype=torch.float32, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    sizes = {file: [4 * t.numel() for t in load_file(tmp_path / file).values()] for file in sorted(files)}
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert all(sum(own) <= 20_000 or len(own) == 1 for own in sizes.values())
    for own, following in pairwise(sizes.values()):
        assert sum(own) + max(following) > 20_000, "no file is smaller than it had to be"
    back = load_hf(tmp_path, compute_dtype=torch.float32)
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    assert_same_logits(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), model, random_tokens(2, 21)
    )


@pytest.mark.parametrize("sizes", [(20_000, 10**9), (10**9, 20_000), (20_000, 40_000)], ids=str)
def test_a_second_model_replaces_the_first_however_many_files_either_has(sizes, tmp_path):
    models = [ours("llama") for _ in sizes]
    for model, size in zip(models, sizes, strict=True):
        save_hf(model.state_dict(), model.config, tmp_path, dtype=torch.float32, shard_bytes=size)
    there: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for found in (there.lm_head.weight, load_hf(tmp_path).head.weight):
        assert torch.equal(found, models[1].head.weight)
    index = tmp_path / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
    assert {file.name for file in tmp_path.glob("*.safetensors")} == set(named)


def test_a_failed_save_leaves_no_model_instead_of_parts_of_two(tmp_path, monkeypatch):
    model, files = ours("llama"), []
    save_hf(model.state_dict(), model.config, tmp_path, shard_bytes=20_000)

    def full(tensors, file, metadata):
        files.append(file)
        if len(files) == 2:
            raise OSError("No space left on device")
        save_file(tensors, file, metadata)

    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_hf(model.state_dict(), model.config, tmp_path, shard_bytes=20_000)
    with pytest.raises(ValueError, match=r"no config.json"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_transformers_wrote_is_read(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    assert_same_logits(load_hf(tmp_path, compute_dtype=torch.float32), model, random_tokens(2, 21))


def test_weights_are_rounded_once_to_the_requested_dtype(tmp_path):
    model = ours("hybrid")
    save_hf(model.state_dict(), model.config, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.lm_head.weight, model.head.weight.bfloat16())


def test_a_folder_without_a_model_and_a_damaged_file_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"not a transformers model \(no config.json\)"):
        load_hf(tmp_path)
    model = ours("llama")
    save_hf(model.state_dict(), model.config, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"model.safetensors: not a readable safetensors file"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json: must map tensors to files"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        load_hf(tmp_path)
