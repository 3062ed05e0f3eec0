"""Odd and damaged files end in one short ValueError: never in another error, and never in a wrong model."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exchange.exchanged import NAMES, ours
from fourbits.exchange.folder import load_hf, save_hf

ODD: list[Any] = [
    *(None, True, False, [], {}, "", "64", "x" * 500, [64], {"a": 1}, [None], [[["deep"]]], {"a": {"b": []}}),
    *(0, -1, 1, 3, 64.0, 1.5, -0.0, float("nan"), float("inf"), 10**9, 10**30, 2**31, -(2**63), 1e308),
]
LONGEST_ERROR = 700
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for name in NAMES:
        made[name] = tmp_path_factory.mktemp("model")
        model = ours(name)
        save_hf(model.state_dict(), model.config, made[name], end_token=3, shard_bytes=100_000)
    return made


def copied(folder: Path, to: Path) -> Path:
    """The files of a folder, as links: only those that a test replaces become files of their own."""
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    return to


def replaced(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def outcome(folder: Path) -> str:
    """'loaded', or the error, which must be one short line of a ValueError."""
    try:
        model = load_hf(folder)
    except ValueError as error:
        text = str(error)
        assert text.startswith(str(folder))
        assert 20 < len(text) - len(str(folder)) < LONGEST_ERROR
        assert "\n" not in text
        return text
    for parameter in model.parameters():
        assert parameter.isfinite().all()
    return "loaded"


def mutated(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One to three keys, at any depth, removed or with an odd value."""
    config = json.loads(json.dumps(config))
    for _ in range(chance.randint(1, 3)):
        tree: Any = config or {"": None}
        key = chance.choice(list(tree))
        while isinstance(tree[key], dict | list) and tree[key] and chance.random() < 0.7:
            tree = tree[key]
            key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        if chance.random() < 0.2:
            del tree[key]
        else:
            tree[key] = chance.choice(ODD)
    return config


@pytest.mark.parametrize("name", NAMES)
def test_a_config_with_odd_values_loads_or_is_refused_in_one_line(name, folders, tmp_path):
    folder = copied(folders[name], tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    chance, outcomes = random.Random(0), list[str]()
    for _ in range(150):
        replaced(folder / "config.json", json.dumps(mutated(config, chance)))
        outcomes.append(outcome(folder))
    assert 5 < outcomes.count("loaded") < 100, "keys that have no effect here may have any value"


def test_an_index_with_odd_values_loads_or_is_refused_in_one_line(folders, tmp_path):
    folder = copied(folders["hybrid"], tmp_path / "odd")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    chance, outcomes = random.Random(1), list[str]()
    for _ in range(150):
        replaced(folder / "model.safetensors.index.json", json.dumps(mutated(index, chance)))
        outcomes.append(outcome(folder))
    assert outcomes.count("loaded") < 60, "only metadata has no effect"
    assert sum("weight_map" in text or "does not hold it" in text for text in outcomes) > 20


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_of_random_bytes_is_refused_in_one_line(file, folders, tmp_path):
    folder = copied(folders["hybrid"], tmp_path / "odd")
    whole = (folder / file).read_bytes()
    chance, texts = random.Random(2), [b"", b"[" * 100_000, b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"\0"]
    for _ in range(40):
        changed = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        texts.append(bytes(changed))
    for text in texts:
        (folder / file).unlink()
        (folder / file).write_bytes(text)
        found = outcome(folder)
        assert found != "loaded" or len(text) > 10


def test_a_weights_file_with_a_damaged_header_is_refused_in_one_line(folders, tmp_path):
    folder = copied(folders["llama"], tmp_path / "odd")
    path = folder / sorted(file.name for file in folder.glob("*.safetensors"))[0]
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    chance = random.Random(3)
    for _ in range(80):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(header)] = chance.randrange(256)
        path.unlink()
        path.write_bytes(changed[: chance.choice([len(changed), len(changed) - 1, 7, 0, header])])
        outcome(folder)


def with_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        found = change(index["weight_map"])
        replaced(path, json.dumps(index if found is None else found))

    return apply


def with_tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    """The change applied to all tensors, in one file."""

    def apply(folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
            file.unlink()
        (folder / "model.safetensors.index.json").unlink()
        save_file(change(tensors), folder / "model.safetensors")

    return apply


def with_config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        replaced(path, json.dumps(json.loads(path.read_text()) | changes))

    return apply


HEAD = "lm_head.weight"


def with_head(value: float) -> Callable[[Path], None]:
    return with_tensors(lambda t: t | {HEAD: t[HEAD].index_fill(0, torch.tensor([3]), value)})


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a list": (lambda f: replaced(f / "config.json", "[]"), "config.json: must hold a JSON object, got list"),
    "null": (lambda f: replaced(f / "config.json", "null"), "must hold a JSON object, got NoneType"),
    "a size as text": (with_config(hidden_size="48"), "hidden_size must be a whole number .*, got '48'"),
    "a size with a point": (with_config(hidden_size=64.0), "hidden_size must be a whole number .*, got 64.0"),
    "no heads": (
        with_config(num_attention_heads=0),
        "num_attention_heads must be a whole .* from 1 .* got 0",
    ),
    "no groups": (with_config(num_key_value_heads=0), "num_key_value_heads must be .* from 1 .*, got 0"),
    "heads without whole groups": (
        with_config(num_attention_heads=4, num_key_value_heads=3),
        r"num_attention_heads must be a multiple of num_key_value_heads \(3\), got 4",
    ),
    "true heads": (with_config(num_attention_heads=True), "num_attention_heads must be .*, got True"),
    "a huge size": (
        with_config(intermediate_size=10**12),
        "intermediate_size must be .* to 262144, got 1000",
    ),
    "many layers": (with_config(num_hidden_layers=10**9), "num_hidden_layers must be .* to 4096, got"),
    "a layer too many": (with_config(num_hidden_layers=3), r"'model.layers.2.input_layernorm.*' is missing"),
    "a layer too few": (
        with_config(num_hidden_layers=1),
        r"'model.layers.1.*' and 8 more are not parameters",
    ),
    "a wide table": (
        with_config(vocab_size=2**25),
        r"must have the shape \[33554432, 48\] .*, got \[64, 48\]",
    ),
    "tied": (with_config(tie_word_embeddings=True), "'lm_head.weight' must be equal to 'model.embed_tokens"),
    "tied in words": (
        with_config(tie_word_embeddings="no"),
        "tie_word_embeddings must be true or false, got",
    ),
    "no epsilon": (with_config(rms_norm_eps=None), "rms_norm_eps must be a number of at least 0, got None"),
    "NaN": (with_config(rope_parameters={"rope_theta": float("nan")}), "rope_theta must be a number above 0"),
    "rope as text": (with_config(rope_parameters="llama3"), "rope_parameters must be a mapping or null, got"),
    "an index as a list": (with_index(lambda _: []), "index.json: must hold a JSON object, got list"),
    "a map as a list": (
        with_index(lambda w: {"weight_map": list(w)}),
        r"must map tensors to files .*, got \[",
    ),
    "an empty map": (with_index(lambda w: w.clear()), r"must map tensors to files in 'weight_map', got {}"),
    "files as numbers": (with_index(lambda w: w.update({HEAD: 3})), "must map tensors to files"),
    "another folder": (
        with_index(lambda w: w.update({HEAD: "../a.safetensors"})),
        "must name .safetensors files of its folder, got '../a.safetensors'",
    ),
    "no such file": (
        with_index(lambda w: w.update({HEAD: "a.safetensors"})),
        "a.safetensors: not a readable safetensors file",
    ),
    "the wrong file": (
        with_index(lambda w: w.update({HEAD: w["model.embed_tokens.weight"]})),
        "maps 'lm_head.weight' to model-.*, which does not hold it",
    ),
    "a compiled model": (
        with_tensors(lambda t: {f"_orig_mod.{name}": value for name, value in t.items()}),
        r"'_orig_mod.*' is a name inside torch.compile. .* model._orig_mod.state_dict\(\)",
    ),
    "compiled blocks": (
        with_tensors(lambda t: {n.replace("layers.0.", "layers.0._orig_mod."): v for n, v in t.items()}),
        "is a name inside torch.compile",
    ),
    "NaN weights": (
        with_head(torch.nan),
        "'lm_head.weight' has 48 values that are not finite",
    ),
    "infinite weights": (with_head(torch.inf), "'lm_head.weight' has 48 values that are not finite"),
    "whole numbers": (
        with_tensors(lambda t: t | {HEAD: t[HEAD].to(torch.int8)}),
        r"'lm_head.weight' must be torch.float64, .*. Dequantize it first",
    ),
    "eight bits": (
        with_tensors(lambda t: t | {HEAD: t[HEAD].to(torch.float8_e4m3fn)}),
        r"'lm_head.weight' must be torch.float64, .*. Dequantize it first",
    ),
    "another shape": (
        with_tensors(lambda t: t | {HEAD: t[HEAD].T.contiguous()}),
        r"'lm_head.weight' must have the shape \[64, 48\] by its configuration, got \[48, 64\]",
    ),
    "a missing tensor": (
        with_tensors(lambda t: {name: value for name, value in t.items() if name != HEAD}),
        "'lm_head.weight' is missing",
    ),
    "a quantized config": (
        with_config(quantization_config={"quant_method": "fp8", "ignored": ["x"] * 500}),
        "weights must be floating-point",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_odd_file_is_refused_by_name(case, folders, tmp_path):
    change, message = CASES[case]
    folder = copied(folders["llama"], tmp_path / "odd")
    change(folder)
    with pytest.raises(ValueError, match=message):
        load_hf(folder)
    assert outcome(folder) != "loaded"


def test_a_wrong_size_is_found_before_anything_of_that_size_is_allocated(folders, tmp_path):
    folder = copied(folders["llama"], tmp_path / "odd")
    with_config(vocab_size=2**26, hidden_size=2**18)(folder)  # 64 TiB
    with pytest.raises(ValueError, match="must have the shape"):
        load_hf(folder)


def test_weights_in_float64_and_float16_are_read(folders, tmp_path):
    for dtype in (torch.float64, torch.float16):
        folder = copied(folders["llama"], tmp_path / str(dtype))
        with_tensors(lambda t, to=dtype: {name: value.to(to) for name, value in t.items()})(folder)
        assert outcome(folder) == "loaded"
