"""The tokenizer: any text there and back, an end token that text cannot forge, and foreign files refused."""

import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from fourbits.data.tokenizer import END_TOKEN, Tokenizer, padded_size

TEXTS = [f"the quick brown fox number {i} jumps over the lazy dog\n" * 3 for i in range(300)]
TOKENIZER = Tokenizer.train(TEXTS, 384)


@given(st.text())
def test_any_text_survives_encoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_text_that_spells_the_end_token_does_not_end_a_document():
    ids = TOKENIZER.encode(f"a{END_TOKEN}b")
    assert TOKENIZER.end_id not in ids
    assert TOKENIZER.decode(ids) == f"a{END_TOKEN}b"
    assert list(TOKENIZER.encode_batch([f"a{END_TOKEN}b"])) == [ids]


def test_the_vocabulary_suits_the_model():
    assert [padded_size(size) for size in (1, 128, 129, 50_257)] == [128, 128, 256, 50_304]
    assert TOKENIZER.vocab_size == 384
    assert TOKENIZER.size <= 384
    few = Tokenizer.train(["ab"], 1000)  # too little text for 1,000 tokens: ids in use and rows differ
    assert few.size == 258
    assert few.vocab_size == 384


def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path):
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


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such tokenizer file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_an_end_token_asks_for_its_name(tmp_path):
    file = str(tmp_path / "t.json")
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "STOP": 1}, unk_token="a")).save(file)
    with pytest.raises(ValueError, match="no end-of-document token"):
        Tokenizer.load(file)
    assert Tokenizer.load(file, end_token="STOP").end_id == 1


def test_ids_that_do_not_exist_are_an_error():
    with pytest.raises(ValueError, match=r"ids must be in \[0, 384\), got 3 to 384"):
        TOKENIZER.decode([3, 384])


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 384"):
        Tokenizer.train(TEXTS, 256)
