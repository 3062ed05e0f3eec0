"""Preparing: complete or invisible, resumable, deterministic, and never without validation text."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fourbits.data.config import DataConfig, open_data
from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.prepare.split import Split
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.token_file import TokenFile, id_type

OPTIONS = PrepareOptions(vocab_size=384, validation_fraction=0.1)


def write_texts(folder: Path, count: int = 200) -> list:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:04}.txt").write_text(f"This is text number {number}.\n" * (1 + number % 7))
    return file_sources([f"letters={folder}"])


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_every_document_is_whole_on_one_side_and_has_an_end_token(tmp_path):
    sources = write_texts(tmp_path / "texts")
    data = prepare(sources, tmp_path / "out", OPTIONS)
    found = []
    for files in (data.train, data.validation):
        file = files["letters"]
        for number in range(file.num_documents):
            ids = file.document(number).tolist()
            assert ids[-1] == data.tokenizer.end_id
            assert data.tokenizer.end_id not in ids[:-1]
            found.append(data.tokenizer.decode(ids))
    assert sorted(found) == sorted(document.text for document in sources[0].read())


def test_the_split_is_by_hash_and_keeps_about_its_fraction(tmp_path):
    data = prepare(write_texts(tmp_path / "texts"), tmp_path / "out", OPTIONS)
    held_out = data.validation["letters"].num_documents
    assert abs(held_out - 20) < 5 * (200 * 0.1 * 0.9) ** 0.5  # five sigma of 200 draws at 0.1
    # A document keeps its side when others are added.
    more = prepare(write_texts(tmp_path / "more", 260), tmp_path / "more-out", OPTIONS)

    def side(prepared: PreparedData) -> set[str]:
        file = prepared.validation["letters"]
        return {prepared.tokenizer.decode(file.document(i).tolist()) for i in range(file.num_documents)}

    assert side(data) <= side(more)


def test_the_manifest_records_counts_and_hashes(tmp_path):
    sources = write_texts(tmp_path / "texts")
    data = prepare(sources, tmp_path / "out", OPTIONS)
    record = data.manifest["sources"]["letters"]
    texts = [document.text for document in sources[0].read()]
    assert record["documents"] == 200
    assert record["text_bytes"] == sum(map(len, texts))
    chain = bytes(32)
    for text in texts:
        chain = hashlib.sha256(chain + hashlib.sha256(text.encode()).digest()).digest()
    assert record["text_sha256"] == chain.hex()
    for split, files in (("train", data.train), ("validation", data.validation)):
        assert record[split]["tokens"] == files["letters"].num_tokens
        for suffix in ("bin", "idx"):
            file = tmp_path / "out" / f"letters.{split}.{suffix}"
            assert record[split][suffix]["sha256"] == digest(tmp_path / "out")[file.name]
    assert data.manifest["tokenizer"]["sha256"] == digest(tmp_path / "out")["tokenizer.json"]


def test_another_process_writes_the_same_bytes(tmp_path):
    sources = write_texts(tmp_path / "texts")
    prepare(sources, tmp_path / "here", OPTIONS)
    program = (
        "from fourbits.data.corpora.sources import file_sources\n"
        "from fourbits.data.prepare.prepare import PrepareOptions, prepare\n"
        f"prepare(file_sources(['letters={tmp_path / 'texts'}']), {str(tmp_path / 'there')!r}, {OPTIONS!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert digest(tmp_path / "here") == digest(tmp_path / "there")


def test_preparing_again_changes_nothing_and_other_options_are_rejected(tmp_path):
    sources = write_texts(tmp_path / "texts")
    prepare(sources, tmp_path / "out", OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepare(sources, tmp_path / "out", OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(ValueError, match="prepared from other text or options"):
        prepare(sources, tmp_path / "out", PrepareOptions(vocab_size=512))


def test_an_interrupted_preparation_is_invisible_and_keeps_finished_sources(tmp_path):
    [first] = write_texts(tmp_path / "texts")
    (tmp_path / "second.txt").write_text("Another source of text. " * 100)
    sources = [first, *file_sources([str(tmp_path / "second.txt")])]

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "second":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(sources, tmp_path / "out", OPTIONS, interrupt)
    with pytest.raises(ValueError, match="not a prepared folder"):
        PreparedData.open(tmp_path / "out")
    finished = (tmp_path / "out" / "letters.train.bin").stat().st_mtime_ns
    prepare(sources, tmp_path / "out", OPTIONS)
    assert (tmp_path / "out" / "letters.train.bin").stat().st_mtime_ns == finished
    prepare(sources, tmp_path / "whole", OPTIONS)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.parametrize("seed", [1, 2])  # its hash is 0.43 and 0.41: training, and validation
def test_a_single_document_gives_its_tail_to_validation(tmp_path, seed):
    text = "".join(f"Line {number} of a long text.\n" for number in range(500))
    (tmp_path / "one.txt").write_text(text)
    options = PrepareOptions(vocab_size=384, validation_fraction=0.42, seed=seed)
    data = prepare(file_sources([str(tmp_path / "one.txt")]), tmp_path / "out", options)
    parts = [data.tokenizer.decode(files["one"].tokens.tolist()) for files in (data.train, data.validation)]
    assert "".join(parts) == text
    total = data.train["one"].num_tokens + data.validation["one"].num_tokens
    assert total < len(text) / 2, "the tokenizer was trained on it, whichever side it is on"
    assert data.train["one"].num_tokens == round(total * 0.58)
    assert data.manifest["sources"]["one"]["held_out"] == "the tail of the only document"


@pytest.mark.parametrize("fraction", [1e-9, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_few_documents_leave_text_on_both_sides(tmp_path, fraction, seed):
    sources = write_texts(tmp_path / "texts", 3)
    options = PrepareOptions(vocab_size=384, validation_fraction=fraction, seed=seed)
    data = prepare(sources, tmp_path / "out", options)
    kept, held_out = (files["letters"].num_documents for files in (data.train, data.validation))
    assert kept + held_out == 3
    assert held_out == 1 if fraction < 0.5 else min(kept, held_out) >= 1


def test_once_both_sides_have_text_no_document_is_remembered(tmp_path):
    """Otherwise the list of copies of the text with the lowest hash would grow to the end."""
    with Split(tmp_path / "x", id_type(384), 0.5, 0) as split:
        for position, lowest in ((0.7, [0]), (0.6, [1]), (0.6, [1, 2]), (0.1, []), (0.01, [])):
            split.add(position, np.array([1, 2]), more=False)
            assert split.state.lowest_documents == lowest
        assert split.finish() == "documents by hash"
    assert TokenFile(tmp_path / "x.validation").num_documents == 2


def test_a_given_tokenizer_is_used_unchanged(tmp_path):
    sources = write_texts(tmp_path / "texts")
    first = prepare(sources, tmp_path / "first", OPTIONS)
    options = PrepareOptions(tokenizer=str(tmp_path / "first"), validation_fraction=0.1)
    second = prepare(sources, tmp_path / "second", options)
    assert second.tokenizer.sha256 == first.tokenizer.sha256
    assert second.train["letters"].tokens.tolist() == first.train["letters"].tokens.tolist()


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("letters.train.bin", lambda b: b[:-2], "letters.train.bin: .* bytes, manifest.json records"),
        ("letters.train.bin", lambda b: b[:-2] + b"\1\1", "letters.train.bin: its content differs from what"),
        ("letters.validation.idx", None, "letters.validation.idx: missing"),
        ("tokenizer.json", lambda b: b.replace(b'"t"', b'"~"'), "tokenizer.json"),
        ("manifest.json", lambda b: b[:50], "manifest.json: damaged"),
        ("manifest.json", lambda b: b'{"format": "other"}', "not a manifest of prepared data"),
        ("manifest.json", lambda b: b.replace(b'"version": 1', b'"version": 2'), "version must be 1, got 2"),
    ],
)
def test_a_changed_folder_is_rejected(tmp_path, name, edit, message):
    prepare(write_texts(tmp_path / "texts"), tmp_path / "out", OPTIONS)
    path = tmp_path / "out" / name
    if edit is None:
        path.unlink()
    else:
        path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        PreparedData.open(tmp_path / "out")


def test_a_source_of_blank_texts_is_rejected(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n \n")
    with pytest.raises(ValueError, match="'blank' has no text in its 1 files"):
        prepare(file_sources([str(tmp_path / "blank.txt")]), tmp_path / "out", OPTIONS)


@pytest.mark.parametrize("fraction", [0.0, 0.6, -1.0])
def test_a_validation_fraction_outside_its_range_is_rejected(fraction):
    with pytest.raises(ValueError, match="validation_fraction must be above 0 and at most"):
        PrepareOptions(validation_fraction=fraction)


def test_runs_with_equal_requests_share_one_prepared_folder(tmp_path):
    write_texts(tmp_path / "texts")
    config = DataConfig(paths=(str(tmp_path / "texts"),), vocab_size=384)
    first = open_data(config, tmp_path / "cache")
    assert open_data(config, tmp_path / "cache").folder == first.folder
    other = open_data(DataConfig(paths=config.paths, vocab_size=512), tmp_path / "cache")
    assert other.folder != first.folder
    # A prepared folder is read where it is.
    prepared = DataConfig(paths=(str(first.folder),))
    assert open_data(prepared, tmp_path / "unused").folder == first.folder
    assert not (tmp_path / "unused").exists()


def test_the_manifest_is_plain_json(tmp_path):
    data = prepare(write_texts(tmp_path / "texts"), tmp_path / "out", OPTIONS)
    assert json.loads(json.dumps(data.manifest)) == data.manifest
