"""No copy of a validation document is trained on, whatever kind of file it is in."""

import numpy as np
import pytest

from fourbits.data.corpora.document import Document, Source
from fourbits.data.corpora.sources import file_sources
from fourbits.data.inspect import duplicate_documents
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.prepare.split import fraction_of
from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.tokenizer import Tokenizer

TEXTS = [f"Text number {number} of sixty.\n" for number in range(60)]
TOKENIZER = Tokenizer.train(TEXTS, 384)
DOCUMENTS = [TOKENIZER.encode(text) for text in TEXTS]


@pytest.fixture
def folder(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    return tmp_path


def write(prefix, documents, dtype="<u2", end=True) -> str:
    with TokenFileWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add([*document, TOKENIZER.end_id] if end or not document else document)
    return f"{prefix}.idx"


def options(folder, **changes) -> PrepareOptions:
    return PrepareOptions(tokenizer=str(folder), validation_fraction=0.2, **changes)


@pytest.mark.parametrize(("dtype", "end"), [("<u2", True), ("<i4", True), ("<u2", False)])
def test_a_copy_of_a_token_file_falls_on_the_same_side(folder, dtype, end):
    """Whatever its integers, and whether its documents have an end token."""
    paths = [write(folder / "a", DOCUMENTS), write(folder / "b", DOCUMENTS[::-1], dtype, end)]
    data = prepare(file_sources(paths), folder / "out", options(folder))
    found = duplicate_documents(data)
    # The deviation of 60 draws at 0.2 is 3.1.
    assert 3 <= data.validation["a"].num_documents <= 24
    assert data.validation["b"].num_documents == data.validation["a"].num_documents
    assert [found["validation"][name].documents for name in "ab"] == [0, 0]


@pytest.mark.parametrize("rule", ["exact", "lines"])
def test_copies_in_token_files_are_dropped(folder, rule):
    paths = [write(folder / "a", DOCUMENTS), write(folder / "b", [*DOCUMENTS[:30], *DOCUMENTS[:30], [5, 6]])]
    data = prepare(file_sources(paths), folder / "out", options(folder, deduplicate=rule))
    record = data.manifest["sources"]["b"]
    assert (record["documents"], record["repeated_documents"]) == (1, 60)


def test_a_source_of_copies_alone_is_refused_by_that_reason(folder):
    paths = [write(folder / "a", DOCUMENTS), write(folder / "b", DOCUMENTS)]
    with pytest.raises(
        ValueError, match="source 'b' has only copies: all of its 60 documents are among earlier"
    ):
        prepare(file_sources(paths), folder / "out", options(folder, deduplicate="exact"))


def test_documents_of_an_end_token_alone_are_skipped(folder):
    """As blank texts are; such a document would train the model to end a text that it has not begun."""
    path = write(folder / "a", [[], *DOCUMENTS, [], []])
    data = prepare(file_sources([path]), folder / "out", options(folder))
    assert data.manifest["sources"]["a"]["documents"] == 60
    lengths = [*data.train["a"].lengths, *data.validation["a"].lengths]
    assert min(lengths) > 1


def test_token_files_prepared_by_their_places_are_prepared_again(folder, monkeypatch):
    """Their request differs, so folders from before documents were identified by tokens are not reused."""
    [source] = file_sources([write(folder / "a", DOCUMENTS)])
    assert "split by tokens" in source.identity


@pytest.mark.parametrize("copies", [2, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_copies_of_one_text_hold_out_a_tail_that_none_of_them_trains_on(folder, copies, seed):
    text = "".join(f"Line {number} of a long text.\n" for number in range(100))
    source = Source("x", (), lambda: iter([Document(str(n), text, "key") for n in range(copies)]))
    data = prepare([source], folder / "out", options(folder, seed=seed))
    tokens = TOKENIZER.encode(text)
    held_out = data.validation["x"].tokens.tolist()
    kept = [data.train["x"].document(number).tolist() for number in range(copies)]
    assert data.validation["x"].num_documents == 1
    assert all(document == [*tokens[: len(document) - 1], TOKENIZER.end_id] for document in kept)
    assert [*kept[0][:-1], *held_out] == [*tokens, TOKENIZER.end_id]
    assert data.manifest["sources"]["x"]["held_out"].startswith(
        f"the tail of the first of {copies} documents"
    )
    assert fraction_of("key", seed) >= 0  # one key for all, whichever side its hash is on
