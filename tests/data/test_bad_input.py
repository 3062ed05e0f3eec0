"""Unusual and invalid input: either it is read, or the error names the file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourbits.data.config import DataConfig, text_sources
from fourbits.data.corpora import json_lines
from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare.prepare import PrepareOptions, locked, prepare
from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.token_file import TokenFile, id_type

OPTIONS = PrepareOptions(vocab_size=384)


def test_a_loop_of_links_is_an_error_and_inside_a_folder_it_is_skipped(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for path in (tmp_path / "one", tmp_path / "one" / "further.txt"):
        with pytest.raises(ValueError, match="cannot be opened: Too many levels of symbolic links"):
            file_sources([str(path)])
    (tmp_path / "text.txt").write_text("Text.\n")
    (tmp_path / "up").symlink_to(".")
    with pytest.warns(UserWarning, match="skipped links to folders: 1; links to nothing: 2"):
        [source] = file_sources([str(tmp_path)])
    assert [document.name for document in source.read()] == ["text.txt"]


def test_a_file_name_need_not_be_utf8(tmp_path):
    odd = os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt")
    Path(odd).write_text("Text in a file of another age.\n" * 20)
    prepare(text_sources([str(tmp_path)]), tmp_path / "folder", OPTIONS)
    data = prepare(text_sources([f"cafe={odd}"]), tmp_path / "named", OPTIONS)
    assert data.manifest["sources"]["cafe"]["documents"] == 1
    with pytest.raises(ValueError, match="cannot be the name of a source; choose another, as in other=PATH"):
        text_sources([odd])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "a.jsonl:2: unreadable JSON: maximum recursion"),
        ('{"text": "a", "n": ' + 5000 * "9" + "}", "a.jsonl:2: unreadable JSON: Exceeds the"),
        (
            '{"text": "a", "split_key": "\\ud800"}',
            "a.jsonl:2: character 4 of name and split_key is a lone surrogate",
        ),
        ('{"text": "' + "a" * 5000 + '"}', "a.jsonl:2: the line is longer than 5000 bytes"),
    ],
)
def test_the_error_names_a_line_that_cannot_be_read(tmp_path, monkeypatch, line, message):
    if "5000 bytes" in message:
        monkeypatch.setattr(json_lines, "LONGEST_LINE", 5000)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    [source] = file_sources([str(tmp_path / "a.jsonl")])
    with pytest.raises(ValueError, match=message):
        list(source.read())


def test_a_line_of_exactly_the_longest_length_is_read(tmp_path, monkeypatch):
    line = json.dumps({"text": "a" * 100}) + "\n"
    monkeypatch.setattr(json_lines, "LONGEST_LINE", len(line))
    (tmp_path / "a.jsonl").write_text(2 * line)
    [source] = file_sources([str(tmp_path / "a.jsonl")])
    assert [document.text for document in source.read()] == ["a" * 100] * 2


def test_empty_paths_and_pipes_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="a path is empty"):
        file_sources([""])
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt: must be a file or a folder"):
        file_sources([str(tmp_path / "pipe.txt")])


@pytest.mark.parametrize("field", [{"paths": ("",)}, {"paths": ("a.txt", "")}, {"tokenizer": ""}])
def test_an_empty_path_in_a_configuration_is_not_the_working_directory(field):
    [name] = field
    with pytest.raises(ValueError, match=f"^{name} is empty"):
        DataConfig(**field)


def test_max_epochs_must_be_positive():
    for epochs in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_epochs must be above 0"):
            DataConfig(max_epochs=epochs)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (34 + 8, 2**32 - 1, "a length is wrong at sequence 2"),  # -1, offset by the one before
        (34 + 4 * 4 + 8, 4, "a pointer is wrong at sequence 0"),
        (34 + 12 * 4 + 16, 0, "the document index is wrong at sequence 1"),
    ],
)
def test_an_index_damaged_in_the_middle_is_rejected_as_a_source(tmp_path, place, value, message):
    with TokenFileWriter(tmp_path / "x", id_type(1000)) as writer:
        for document in ([7, 8, 9], [1], [2], [3, 4]):
            writer.add(document)
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    raw[place : place + 4] = value.to_bytes(4, "little")
    if value == 2**32 - 1:
        raw[34 + 4] = 3
    (tmp_path / "x.idx").write_bytes(raw)
    TokenFile(tmp_path / "x")  # opening does not check this, to be fast
    with pytest.raises(ValueError, match=message):
        file_sources([str(tmp_path / "x.idx")])


@pytest.mark.parametrize("key", ["request", "tokenizer", "sources"])
def test_a_manifest_without_its_parts_is_damaged(tmp_path, key):
    (tmp_path / "a.txt").write_text("Some text.\n" * 50)
    folder = prepare(file_sources([str(tmp_path / "a.txt")]), tmp_path / "out", OPTIONS).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[key]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"manifest.json: damaged: '{key}' is missing"):
        PreparedData.open(folder)


PROGRAM = """
import resource, sys
from fourbits.cli.main import main
if limit := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(["data", *sys.argv[2:]]))
"""


def command(text: Path, out: Path, limit: int = 0) -> subprocess.Popen:
    return fourbits_data(limit, "prepare", str(text), "--out", str(out), "--vocab-size", "384")


def fourbits_data(limit: int, *words: str) -> subprocess.Popen:
    argv = [sys.executable, "-c", PROGRAM, str(limit), *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_failed_write_names_the_file_and_the_next_call_resumes(tmp_path):
    """With the system's limit on file size, which makes a write fail like a full disk."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {number} of a text.\n" for number in range(40_000)))
    failed = command(text, tmp_path / "out", limit=100_000)
    _, errors = failed.communicate()
    assert failed.returncode == 1
    assert errors.splitlines()[-1] == f"fourbits data: {tmp_path}/out/text.train.bin.tmp: File too large."
    assert not (tmp_path / "out" / "manifest.json").exists()
    again = command(text, tmp_path / "out")
    again.communicate()
    assert again.returncode == 0
    PreparedData.open(tmp_path / "out", verify=True)


def test_a_failed_write_of_a_corpus_names_the_file(tmp_path):
    failed = fourbits_data(100_000, "corpus", "stdlib", "--out", str(tmp_path))
    _, errors = failed.communicate()
    assert (failed.returncode, errors) == (1, f"fourbits data: {tmp_path}/code.jsonl.tmp: File too large.\n")


def test_a_process_warns_while_it_waits_for_another_in_the_same_folder(tmp_path):
    (tmp_path / "text.txt").write_text("Some text.\n" * 50)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        process = command(tmp_path / "text.txt", tmp_path / "out")
        assert process.stderr is not None
        assert "out: waiting for another process that prepares it" in process.stderr.readline()
        assert not (tmp_path / "out" / "tokenizer.json").exists()
    process.communicate()
    assert process.returncode == 0


def test_two_processes_that_prepare_one_folder_are_serialized(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {number} of a text.\n" for number in range(100_000)))
    both = [command(text, tmp_path / "out") for _ in range(2)]
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert not (tmp_path / "out" / ".preparing").exists()
    PreparedData.open(tmp_path / "out", verify=True)
