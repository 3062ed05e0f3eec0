"""The tokenizer: any text round-trips, no text encodes to the end token, and other files are rejected."""

import base64
import json
import subprocess
import sys

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from fourbits.data import tekken
from fourbits.data.tokenizer import END_TOKEN, Tokenizer, padded_size

TEXTS = [f"the quick brown fox number {i} jumps over the lazy dog\n" * 3 for i in range(300)]
TOKENIZER = Tokenizer.train(TEXTS, 384)


@given(st.text())
def test_any_text_decodes_to_itself(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_text_that_spells_the_end_token_does_not_end_a_document():
    ids = TOKENIZER.encode(f"a{END_TOKEN}b")
    assert TOKENIZER.end_id not in ids
    assert TOKENIZER.decode(ids) == f"a{END_TOKEN}b"
    assert list(TOKENIZER.encode_batch([f"a{END_TOKEN}b"])) == [ids]


def test_the_vocabulary_is_padded_to_a_multiple_of_128():
    assert [padded_size(size) for size in (1, 128, 129, 50_257)] == [128, 128, 256, 50_304]
    assert TOKENIZER.vocab_size == 384
    assert TOKENIZER.size <= 384
    few = Tokenizer.train(["ab"], 1000)  # too little text for 1,000 tokens: size and vocab_size differ
    assert few.size == 258
    assert few.vocab_size == 384


def test_a_saved_tokenizer_loads_as_the_same_tokenizer(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.sha256 == TOKENIZER.sha256
    assert loaded.encode("the lazy fox") == TOKENIZER.encode("the lazy fox")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_training_gives_the_same_tokenizer_in_another_process():
    program = (
        f"from fourbits.data.tokenizer import Tokenizer\nprint(Tokenizer.train({TEXTS[:50]!r}, 384).sha256)"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == Tokenizer.train(TEXTS[:50], 384).sha256


def test_a_file_that_is_not_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="no such tokenizer file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_a_known_end_token_needs_its_name(tmp_path):
    file = str(tmp_path / "t.json")
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "STOP": 1}, unk_token="a")).save(file)
    with pytest.raises(ValueError, match="no end-of-document token"):
        Tokenizer.load(file)
    assert Tokenizer.load(file, end_token="STOP").end_id == 1


def tekken_of(tokenizer: tokenizers.Tokenizer, path) -> None:
    """Write the tekken.json that is equivalent to a byte-level BPE with merges."""
    alphabet = {letter: byte for byte, letter in enumerate(tekken._letters())}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word != END_TOKEN]
    strings = [bytes(alphabet[letter] for letter in word) for word in words]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(string).decode()}
        for rank, string in enumerate([*strings, b"never a token"])
    ]
    config = {
        "pattern": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "default_vocab_size": len(strings) + 10,
        "default_num_special_tokens": 10,
    }
    path.write_text(json.dumps({"config": config, "vocab": entries}))


def test_ranks_encode_like_the_merges_they_represent(tmp_path):
    tekken_of(TOKENIZER._inner, tmp_path / "tekken.json")
    loaded = Tokenizer.load(tmp_path / "tekken.json")
    first = TOKENIZER.encode("a")[0] - loaded.encode("a")[0]
    for text in (*TEXTS[:5], "It's a text:\n\n  of \u00e9 \U0001f600 12345 </s>", ""):
        assert [token + first for token in loaded.encode(text)] == TOKENIZER.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.end_token, loaded.end_id) == ("</s>", 2)
    loaded.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).sha256 == loaded.sha256


def test_the_error_names_a_damaged_rank_file(tmp_path):
    tekken_of(TOKENIZER._inner, tmp_path / "tekken.json")
    content = json.loads((tmp_path / "tekken.json").read_text())
    content["vocab"][300]["token_bytes"] = base64.b64encode(b"unreachable").decode()
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"not a tekken\.json: ValueError: no two strings of lower rank"):
        Tokenizer.load(tmp_path / "tekken.json")


def test_tekken_by_name_needs_the_package_that_ships_it(monkeypatch):
    monkeypatch.setattr("fourbits.data.tekken.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps mistral-common"):
        Tokenizer.load("tekken")


def test_a_transformers_tokenizer_is_used_with_its_end_token(tmp_path):
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER._inner, eos_token=END_TOKEN)
    fast.save_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    # A tokenizer without tokenizer.json is converted by transformers.
    (tmp_path / "slow").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox"]
    (tmp_path / "slow" / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "slow" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    slow = Tokenizer.load(tmp_path / "slow", end_token="[SEP]")
    assert (slow.encode("the fox"), slow.end_id) == ([5, 6], 3)


def test_an_unknown_tokenizer_name_is_rejected(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="nobody/nothing: no such tokenizer file, and transformers reports"):
        Tokenizer.load("nobody/nothing")


def test_decoding_a_token_outside_the_vocabulary_raises():
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 384\), got 3 to 384"):
        TOKENIZER.decode([3, 384])


def test_a_vocabulary_smaller_than_the_bytes_is_rejected():
    with pytest.raises(ValueError, match="at least 384"):
        Tokenizer.train(TEXTS, 256)
