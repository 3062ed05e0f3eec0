"""A tokenizer that loses text is refused, and what it loses is counted."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare import round_trip
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.tokenizer import Tokenizer

ENGLISH = [f"The quick brown fox jumps over {number} lazy dogs.\n" for number in range(60)]
GREEK = [f"\u0397 \u03b1\u03bb\u03b5\u03c0\u03bf\u03cd {number}.\n" for number in range(60)]
JAPANESE = [f"\u3059\u3070\u3084\u3044\u304d\u3064\u306d\u304c\u98db\u3076 {n}\u3002\n" for n in range(60)]


@pytest.fixture
def folder(tmp_path):
    """With a BPE of English letters: no unknown token, no bytes. Text in other letters becomes nothing."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    inner.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    inner.train_from_iterator(ENGLISH, trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"]))
    inner.save(str(tmp_path / "english.json"))
    return tmp_path


def prepared(folder, texts, out="out", **changes):
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = PrepareOptions(tokenizer=str(folder / "english.json"), **changes)
    return prepare(file_sources([str(path)]), folder / out, options)


@pytest.mark.parametrize(("texts", "letter"), [(GREEK, "\u03b1"), (JAPANESE, "\u3059")])
def test_a_tokenizer_without_the_letters_of_a_text_is_refused(folder, texts, letter):
    with pytest.raises(
        ValueError, match=r"the tokenizer loses \d\d\.\d% of the characters of 'text'.*--max-lost"
    ):
        prepared(folder, texts)
    assert not (folder / "out" / "manifest.json").exists()
    tokenizer = Tokenizer.load(folder / "english.json")
    assert letter not in tokenizer.decode(tokenizer.encode(texts[0]))


def test_what_is_lost_is_counted_exactly_where_every_document_is_sampled(folder):
    texts = [*ENGLISH, *(f"The fox {letter}.\n" for letter in "\u03b1\u03b2\u3059")]
    data = prepared(folder, texts, max_lost=0.01)
    reading = data.manifest["reading"]["text"]
    assert reading["sampled_characters"] == sum(map(len, texts))
    assert reading["lost_characters"] == 3
    assert reading["unencodable_documents"] == 0


def test_the_limit_is_inclusive(folder):
    texts = [*ENGLISH, "The fox \u03b1.\n"]
    share = 1 / sum(map(len, texts))
    prepared(folder, texts, max_lost=share)
    with pytest.raises(ValueError, match=r"2 of [\d,]+ sampled"):
        prepared(folder, [*texts, "\u03b1"], "other", max_lost=share)


def test_a_document_without_any_token_is_not_written_as_an_end_token(folder):
    texts = [*ENGLISH, "\u03b1\u03b2\u03b3", "\u3059\u3070"]
    data = prepared(folder, texts, max_lost=1.0)
    assert data.manifest["sources"]["text"]["documents"] == 60
    assert data.manifest["reading"]["text"]["unencodable_documents"] == 2
    for file in (data.train["text"], data.validation["text"]):
        assert file.lengths.min() > 1


def test_a_source_without_any_token_says_so(folder):
    with pytest.raises(ValueError, match="'text' has no tokens: the tokenizer encodes all of its 1 doc"):
        prepared(folder, ["\u03b1\u03b2\u03b3"], max_lost=1.0)


def test_a_long_source_is_refused_before_its_end(folder, monkeypatch):
    monkeypatch.setattr("fourbits.data.prepare.encode.BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(round_trip, "_EARLY_SAMPLE", 500)
    done: list[int] = []
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in GREEK * 30))
    options = PrepareOptions(tokenizer=str(folder / "english.json"))
    with pytest.raises(ValueError, match="the tokenizer loses"):
        prepare(file_sources([str(path)]), folder / "out", options, lambda what, now, total: done.append(now))
    assert max(done, default=0) < path.stat().st_size / 10


def test_a_tokenizer_of_bytes_loses_nothing_in_any_language(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [*GREEK, *JAPANESE]))
    options = PrepareOptions(vocab_size=384, max_lost=0.0)
    data = prepare(file_sources([str(tmp_path / "a.jsonl")]), tmp_path / "out", options)
    assert data.manifest["reading"]["a"]["lost_characters"] == 0


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_zero_to_one_is_rejected(share):
    with pytest.raises(ValueError, match="max_lost must be between 0 and 1"):
        PrepareOptions(max_lost=share)
