"""Folders that we write are read by transformers without losing a bit, and the reverse."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from exchange.exchanged import NAMES, assert_same_logits, ours, theirs
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.model.lm import LanguageModel
from model.shapes import random_tokens


def assert_same_bits(found: LanguageModel, wanted: LanguageModel) -> None:
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for key, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_single_file_is_read_by_both_without_losing_a_bit(name, tied, tmp_path):
    """Also with tied tables in FP32, which a NemotronH has twice and a file cannot hold in one storage."""
    model = ours(name, tie_embeddings=tied)
    save_hf(model.state_dict(), model.config, tmp_path, dtype=torch.float32)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1, "all files have the same permissions"
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (not tied or name == "hybrid")
    assert_same_bits(load_hf(tmp_path, compute_dtype=torch.float32), model)
    there: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert there.get_input_embeddings().padding_idx is None, "no row that stays zero"
    assert_same_logits(there, model, random_tokens(2, 21))


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
    assert_same_bits(load_hf(tmp_path, compute_dtype=torch.float32), model)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_that_transformers_wrote_is_read(name, tied, tmp_path):
    model = theirs(name, tie_word_embeddings=tied)
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
    with pytest.raises(ValueError, match=r"must have either model.safetensors or .*index.json, got both"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index.json: must map tensors to files"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: damaged: .* Download or export the model again"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", '{"port": 80}'), ("tokenizer.json", "{}"), ("model.safetensors", "")],
)
def test_files_of_a_folder_without_a_model_are_not_replaced(name, content, tmp_path):
    model = ours(NAMES[0])
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"holds a {name} but no model"):
        save_hf(model.state_dict(), model.config, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content
