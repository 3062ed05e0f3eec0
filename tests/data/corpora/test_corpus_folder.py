"""A corpus folder returns the documents that were written to it, or an error that names the damage."""

import json

import pytest

from fourbits.data.config import text_sources
from fourbits.data.corpora.corpus_folder import CORPUS_FILE, is_corpus, write_corpus
from fourbits.data.corpora.document import Document, Source

DOCUMENTS = [
    Document("a b", 'line\n"two" \u00e9\u2028', "key 1"),
    Document("c", "x", "key 1"),
    Document("d", "y", "key 2"),
]
SOURCES = [
    Source("one", (), lambda: iter(DOCUMENTS), "CC0-1.0"),
    Source("two", (), lambda: iter(DOCUMENTS[1:]), "MIT"),
]


def corpus(**sources) -> bytes:
    return json.dumps({"format": "fourbits-corpus", "version": 1, "sources": sources}).encode()


def test_a_corpus_is_read_as_written_with_names_keys_and_licences(tmp_path):
    write_corpus(SOURCES, tmp_path / "corpus")
    one, two = text_sources([str(tmp_path / "corpus")])
    assert (one.name, one.licence, list(one.read())) == ("one", "CC0-1.0", DOCUMENTS)
    assert (two.name, two.licence, list(two.read())) == ("two", "MIT", DOCUMENTS[1:])


def test_an_incomplete_corpus_is_not_a_corpus(tmp_path):
    def broken():
        yield DOCUMENTS[0]
        raise ValueError("bad text")

    with pytest.raises(ValueError, match="bad text"):
        write_corpus([Source("one", (), broken)], tmp_path)
    assert not is_corpus(tmp_path)
    write_corpus(SOURCES, tmp_path)
    with pytest.raises(ValueError, match="already holds a corpus"):
        write_corpus(SOURCES, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("one.jsonl", b"{}", "one.jsonl: 2 bytes, corpus.json records"),
        (CORPUS_FILE, b"{", "corpus.json: damaged"),
        (CORPUS_FILE, b'{"format": "other"}', "its format must be 'fourbits-corpus', version 1"),
        (CORPUS_FILE, corpus(one={"bytes": 2}), "'sources.one.licence' is missing; build the corpus again"),
        (
            CORPUS_FILE,
            corpus(one={"bytes": "2", "licence": ""}),
            "'sources.one.bytes' must be a whole number",
        ),
        (CORPUS_FILE, corpus(one=[]), r"'sources.one' must be an object, got \[\]"),
        (CORPUS_FILE, corpus(**{"../one": {}}), r"'../one' cannot be the name of a source in this folder"),
    ],
)
def test_the_error_names_the_damaged_file(tmp_path, name, content, message):
    write_corpus(SOURCES, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text_sources([str(tmp_path)])
