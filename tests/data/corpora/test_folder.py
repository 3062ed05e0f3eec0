"""A folder is read as people have it, and what is not read is counted, named, and refused if it is most."""

import gzip
import json
import os
import re
import warnings
from pathlib import Path

import pyarrow as pa
import pytest

from fourbits.data.corpora.document import SkippedFiles
from fourbits.data.corpora.sources import ReadOptions, file_sources
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.stream.manifest import read_manifest

TEXTS = [f"Record {number}, \u00e9.\nSecond line." for number in range(5)]
LINES = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()
ROWS = b"id,text\r\n" + b"".join(b'1,"%s"\r\n' % text.encode() for text in TEXTS)


def written(folder: Path, name: str, raw: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if name.lower().endswith(".gz"):
        raw = gzip.compress(raw)
    if name.lower().endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(raw)
    else:
        path.write_bytes(raw)
    return path


def texts_of(path: Path, options: ReadOptions | None = None) -> list[str]:
    [source] = file_sources([str(path)], options or ReadOptions())
    return [document.text for document in source.read()]


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".csv", ".JSONL", ".Json", ".CSV"])
def test_records_are_read_under_every_name_they_have(tmp_path, suffix, end):
    raw = ROWS if suffix.lower() == ".csv" else LINES
    path = written(tmp_path / "in", f"a{suffix}{end.upper() if suffix.isupper() else end}", raw)
    assert texts_of(path) == TEXTS
    assert texts_of(path.parent) == TEXTS
    assert file_sources([str(path)])[0].name == "a"


@pytest.mark.parametrize("name", ["A.TXT", "b.Md", "c.PY", "d.txt.GZ", "e.R", "f.py.zst"])
def test_texts_are_read_whatever_the_case_of_their_names(tmp_path, name):
    path = written(tmp_path / "in", name, b"One text.\n")
    assert texts_of(path) == texts_of(path.parent) == ["One text.\n"]


def test_a_folder_of_compressed_shards_gives_the_shards_and_the_readme(tmp_path):
    for number in range(3):
        written(tmp_path / "in", f"shard-{number}.json.gz", LINES)
    written(tmp_path / "in", "README.md", b"# About\n")
    assert texts_of(tmp_path / "in") == ["# About\n", *3 * TEXTS]


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("package.json", b'{\n  "name": "x"\n}\n', ".json not JSON lines"),
        ("array.json", b'[{"text": "a"}]\n', ".json not JSON lines"),
        ("meta.json", b'{"name": "x"}\n', ".json without a field 'text'"),
        ("empty.json", b"{}\n", ".json without a field 'text'"),
        ("deep.json", b"[" * 100_000, ".json not JSON lines"),
        ("latin.json", b'{"text": "\xe9"}\n', ".json not JSON lines"),
        ("table.csv", b"a,b\n1,2\n", ".csv without a column 'text'"),
        ("note.csv", b'"a"b,text\n', ".csv not a table"),
    ],
)
def test_files_whose_content_is_not_text_are_skipped_in_a_folder_and_refused_by_name(
    tmp_path, name, raw, reason
):
    path = written(tmp_path / "in", name, raw)
    written(tmp_path / "in", "long.txt", b"Text. " * 100_000)
    with pytest.warns(UserWarning, match=f"skipped {re.escape(reason)}: 1 "):
        [source] = file_sources([str(path.parent)])
    assert [document.name for document in source.read()] == ["long.txt"]
    assert source.skipped == {reason: SkippedFiles(1, len(raw))}
    with pytest.raises(ValueError, match=re.escape(reason.partition(" ")[2])):
        file_sources([str(path)])


def test_a_folder_of_which_most_would_be_skipped_is_refused_unless_allowed(tmp_path):
    written(tmp_path / "in", "README.md", b"# About\n")
    written(tmp_path / "in", "b.tar.gz", os.urandom(3000))
    written(tmp_path / "in", "LICENSE", b"x" * 9)
    with pytest.raises(
        ValueError,
        match=r"most of this folder, 3,0\d\d bytes of 3,0\d\d bytes, would be skipped: \.tar\.gz: 1 "
        r"\(3,0\d\d bytes\); without extension: 1 \(9 bytes\)\..*with --allow-skipped",
    ):
        file_sources([str(tmp_path / "in")])
    with pytest.warns(UserWarning, match=r"skipped \.tar\.gz: 1"):
        assert texts_of(tmp_path / "in", ReadOptions(allow_skipped=True)) == ["# About\n"]


TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# a cache\n"


@pytest.mark.parametrize(
    ("name", "files", "is_cache"),
    [
        ("__pycache__", {"a.cpython-311.pyc": bytes(9000), "note.txt": b"Not read.\n"}, True),
        ("target", {"CACHEDIR.TAG": TAG, "debug.rlib": bytes(9000), "note.txt": b"Not read.\n"}, True),
        ("node_modules", {"note.txt": b"Read.\n"}, False),
        ("untagged", {"CACHEDIR.TAG": b"Signature: none\n", "note.txt": b"Read.\n"}, False),
    ],
)
def test_caches_are_counted_but_neither_read_nor_held_against_the_folder(tmp_path, name, files, is_cache):
    written(tmp_path / "package", "a.py", b"answer = 42\n")
    (tmp_path / "package" / "inner").mkdir()
    for file, raw in files.items():
        written(tmp_path / "package" / "inner" / name, file, raw)
    options = ReadOptions(allow_skipped=not is_cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_cache else "ignore")
        [source] = file_sources([str(tmp_path / "package")], options)
    assert [each.text for each in source.read()] == ["answer = 42\n", *([] if is_cache else ["Read.\n"])]
    assert (source.skipped.get("caches") == SkippedFiles(1, 0)) == is_cache


def test_a_cache_that_is_named_is_read(tmp_path):
    written(tmp_path / "target", "CACHEDIR.TAG", TAG)
    written(tmp_path / "target", "note.md", b"Read, because its folder is named.\n" * 4)
    with pytest.warns(UserWarning, match=r"skipped \.tag: 1"):
        assert len(texts_of(tmp_path / "target")) == 1


def test_exactly_half_is_not_most(tmp_path):
    written(tmp_path / "in", "a.txt", b"12345678")
    written(tmp_path / "in", "b.png", b"12345678")
    with pytest.warns(UserWarning, match="skipped"):
        file_sources([str(tmp_path / "in")])
    written(tmp_path / "in", "b.png", b"123456789")
    with pytest.raises(ValueError, match="most of this folder"):
        file_sources([str(tmp_path / "in")])


def test_the_remedy_fits_what_was_skipped(tmp_path):
    written(tmp_path / "fields", "a.json.gz", b'{"content": "x"}\n')
    with pytest.raises(ValueError, match=r"no text files, but \.json\.gz without.*with --text-field"):
        file_sources([str(tmp_path / "fields")])
    assert texts_of(tmp_path / "fields", ReadOptions(text_field="content")) == ["x"]
    written(tmp_path / "blobs", "1234", LINES)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.jsonl").symlink_to(tmp_path / "blobs" / "1234")
    with pytest.raises(ValueError, match=r"but links to files: 1 .*Read links with --follow-links"):
        file_sources([str(tmp_path / "links")])


def test_links_to_files_are_read_if_named_or_asked_for(tmp_path):
    """As in a folder of the Hub's cache, where every file is a link to a blob without extension."""
    written(tmp_path / "blobs", "1234", LINES)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "a.jsonl"
    link.symlink_to(tmp_path / "blobs" / "1234")
    assert texts_of(link) == TEXTS
    assert texts_of(tmp_path / "links", ReadOptions(follow_links=True)) == TEXTS
    written(tmp_path / "links", "long.txt", b"Text. " * 1000)
    with pytest.warns(UserWarning, match="links to files: 1"):
        [source] = file_sources([str(tmp_path / "links")])
    assert source.files == (tmp_path / "links" / "long.txt",)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    written(tmp_path / "in", "a.txt", b"Text.")
    written(tmp_path / "in/private", "b.txt", b"Text.")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match="private: cannot be read: Permission denied"):
        file_sources([str(tmp_path / "in")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b'id,text\n1,"open\n', r"a\.csv:2: not a valid row"),
        (b"id,text\n1,a,b\n", r"a\.csv:2: the row has 3 fields, the header 2"),
        (b'id,text\n1,"a\nb"\n2\n', r"a\.csv:4: the row has 1 fields, the header 2"),
        (b"id,text\n1,\xff\n", r"a\.csv: not UTF-8: byte 0xff at offset 10"),
    ],
)
def test_the_error_names_a_row_that_cannot_be_read(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        texts_of(written(tmp_path / "in", "a.csv", rows))


def test_a_table_of_another_column_says_which_it_has(tmp_path):
    path = written(tmp_path / "in", "a.csv", b"id,content\n1,x\n")
    assert texts_of(path, ReadOptions(text_field="content")) == ["x"]
    with pytest.raises(ValueError, match=r"without a column 'text'\..* --text-field"):
        file_sources([str(path)])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.csv", "A .csv file must have a header, with the text in 'text'"),
        ("a.json", "jq -c '.[]' a.json > a.jsonl"),
        ("a.json.gz", "zcat a.json.gz | jq -c '.[]' > a.jsonl"),
        ("a.json.zst", "zstdcat a.json.zst | jq -c '.[]' > a.jsonl"),
    ],
)
def test_the_remedy_for_a_named_file_fits_its_kind(tmp_path, name, remedy):
    path = written(tmp_path, name, b'[{"text": "x"}]\n' if ".json" in name else b"id,content\n1,x\n")
    with pytest.raises(ValueError, match=re.escape(remedy)) as error:
        file_sources([str(path)])
    assert ("jq" in str(error.value)) == (".json" in name)


def test_a_field_may_hold_a_long_text_with_line_breaks(tmp_path):
    text = "A line of a long text.\n" * 100_000
    assert texts_of(written(tmp_path / "in", "a.csv", f'text\n"{text}"\n'.encode())) == [text]


def test_what_was_skipped_is_recorded_apart_from_what_identifies_the_tokens(tmp_path):
    records = []
    for name in ("with", "without"):
        folder = tmp_path / name / "in"
        folder.parent.mkdir()
        written(folder, "a.txt", b"Some text of this folder.\n" * 40)
        if name == "with":
            written(folder, "b.png", b"1234")
            with pytest.warns(UserWarning, match=r"\.png: 1 \(4 bytes\)"):
                sources = file_sources([str(folder)])
        else:
            sources = file_sources([str(folder)])
        prepare(sources, tmp_path / name / "out", PrepareOptions(vocab_size=384))
        records.append(read_manifest(tmp_path / name / "out"))
    assert records[0]["reading"]["in"]["skipped_files"] == {".png": {"files": 1, "num_bytes": 4}}
    assert records[1]["reading"]["in"]["skipped_files"] == {}
    assert records[0]["sources"] == records[1]["sources"]
