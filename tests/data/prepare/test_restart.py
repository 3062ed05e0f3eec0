"""After a kill, a full disk or a changed file, finished work stays and the final bytes are the same."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourbits.data.corpora import open_text, text_files
from fourbits.data.corpora.pieces import split_text
from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare import encode, prepare_source
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.stream.dataset import PreparedData

OPTIONS = PrepareOptions(vocab_size=384, validation_fraction=0.1, deduplicate="lines")
STEP = 1 << 18

# Saves its progress after every 256 KiB, and kills itself when `kill_at` bytes are reported.
KILLED = """
import os, signal, sys
from fourbits.data.prepare import encode, prepare_source
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.corpora.sources import file_sources
prepare_source.SAVE_BYTES, encode.BATCH_CHARACTERS = 1 << 18, 1 << 16
path, out, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
def report(what, done, total):
    if what == "lines" and done >= kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
prepare(file_sources([path]), out, {options!r}, report)
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    """1.25 MiB of JSON lines in documents of about 1 kB, one in seven a duplicate."""
    path = tmp_path_factory.mktemp("text") / "lines.jsonl"
    with path.open("w") as file:
        for number in range(5 * 256):
            number -= 3 * (number % 7 == 6)
            text = "".join(f"Line {line} of the document {number}.\n" for line in range(32))
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(lines, tmp_path_factory) -> Path:
    return prepare(file_sources([str(lines)]), tmp_path_factory.mktemp("whole"), OPTIONS).folder


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(prepare_source, "SAVE_BYTES", STEP)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", STEP // 4)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def kill(lines: Path, out: Path, at: int) -> None:
    program = KILLED.format(options=OPTIONS)
    ended = subprocess.run([sys.executable, "-c", program, str(lines), str(out), str(at)], check=False)
    assert ended.returncode == -signal.SIGKILL


def test_a_kill_inside_a_source_costs_little_work_and_changes_no_byte(lines, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for at in (1 * STEP, 3 * STEP, 4 * STEP):
        kill(lines, out, at)
        with pytest.raises(ValueError, match="not a prepared folder"):
            PreparedData.open(out)
    saved = json.loads((out / "lines.progress.json").read_text())["tally"]["text_bytes"]
    assert saved >= 2 * STEP
    encoded: list[int] = []
    monkeypatch.setattr(
        "fourbits.data.tokenizer.Tokenizer.encode_batch",
        count_characters("fourbits.data.tokenizer", encoded),
    )
    data = prepare(file_sources([str(lines)]), out, OPTIONS)
    assert sum(encoded) == data.manifest["sources"]["lines"]["text_bytes"] - saved
    assert digest(out) == digest(whole)
    assert data.manifest["sources"]["lines"]["repeated_documents"] > 125


def count_characters(module: str, seen: list[int]):
    original = sys.modules[module].Tokenizer.encode_batch

    def encode_batch(self, texts):
        seen.append(sum(map(len, texts)))
        return original(self, texts)

    return encode_batch


def test_a_kill_at_any_time_leaves_a_folder_that_can_be_resumed(lines, whole, tmp_path):
    """Killed by the parent at arbitrary points, five times, then finished."""
    out, program = tmp_path / "out", KILLED.format(options=OPTIONS)
    for delay in (0.1, 0.3, 0.2, 0.4, 0.25):
        argv = [sys.executable, "-c", program, str(lines), str(out), str(1 << 60)]
        with subprocess.Popen(argv) as process:
            start = time.monotonic()
            while process.poll() is None and not list(out.glob("*.tmp")) and time.monotonic() - start < 60:
                time.sleep(0.01)
            time.sleep(delay)
            process.kill()
    prepare(file_sources([str(lines)]), out, OPTIONS)
    assert digest(out) == digest(whole)


def test_a_full_disk_raises_and_the_next_call_resumes(lines, whole, tmp_path, monkeypatch):
    room = [3]

    def sync(file):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        file.flush()

    with monkeypatch.context() as full:
        full.setattr("fourbits.data.prepare.token_writer.sync", sync)
        with pytest.raises(OSError, match="No space left on device"):
            prepare(file_sources([str(lines)]), tmp_path / "out", OPTIONS)
    assert not list((tmp_path / "out").glob("*.bin"))
    prepare(file_sources([str(lines)]), tmp_path / "out", OPTIONS)
    assert digest(tmp_path / "out") == digest(whole)


def test_an_encoder_error_ends_the_call_and_keeps_the_finished_work(lines, whole, tmp_path, monkeypatch):
    original, calls = sys.modules["fourbits.data.tokenizer"].Tokenizer.encode_batch, [0]

    def encode_batch(self, texts):
        calls[0] += 1
        if calls[0] == 10:
            raise MemoryError("no memory for this batch")
        return original(self, texts)

    with monkeypatch.context() as failing:
        failing.setattr("fourbits.data.tokenizer.Tokenizer.encode_batch", encode_batch)
        with pytest.raises(MemoryError, match="no memory for this batch"):
            prepare(file_sources([str(lines)]), tmp_path / "out", OPTIONS)
    assert (tmp_path / "out" / "lines.progress.json").is_file()
    prepare(file_sources([str(lines)]), tmp_path / "out", OPTIONS)
    assert digest(tmp_path / "out") == digest(whole)


def test_an_interrupted_document_is_resumed_inside_it(tmp_path, monkeypatch):
    """One text in pieces of 16 KiB, saved in the middle, with its tokens so far and no end token."""
    monkeypatch.setattr(text_files, "LONG_FILE", STEP // 4)
    monkeypatch.setattr(open_text, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(text_files, "split_text", lambda chunks: split_text(chunks, STEP // 16))
    (tmp_path / "long.txt").write_text("".join(f"Line {number} of a text.\n" for number in range(40_000)))
    sources = file_sources([str(tmp_path / "long.txt")])
    options = PrepareOptions(vocab_size=384)

    def stop(what: str, done: int, total: int) -> None:
        if what == "long" and done >= 3 * STEP:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(sources, tmp_path / "out", options, stop)
    saved = json.loads((tmp_path / "out" / "long.progress.json").read_text())
    assert saved["tally"]["documents"] == saved["split"]["documents"] == 0
    assert saved["tally"]["text_bytes"] > STEP
    data = prepare(sources, tmp_path / "out", options)
    assert data.manifest["sources"]["long"]["documents"] == 1
    prepare(sources, tmp_path / "clean", options)
    assert digest(tmp_path / "out") == digest(tmp_path / "clean")


def test_earlier_output_survives_a_later_failure(lines, whole, tmp_path):
    before = digest(whole)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(ValueError, match=r"prepared from other text or options"):
        prepare(file_sources([str(tmp_path / "bad.jsonl")]), whole, OPTIONS)
    assert digest(whole) == before


def test_the_error_names_a_file_that_changes_while_it_is_read(lines, tmp_path):
    copy = tmp_path / "lines.jsonl"
    copy.write_bytes(lines.read_bytes())

    def append(what, done, total):
        if what == "lines" and done < total:
            with copy.open("a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(ValueError, match=r"lines\.jsonl: changed while it was read"):
        prepare(file_sources([str(copy)]), tmp_path / "out", OPTIONS, append)
    assert not (tmp_path / "out" / "manifest.json").exists()
    # Once it no longer changes it is prepared from the start, because its text is different now.
    data = prepare(file_sources([str(copy)]), tmp_path / "out", OPTIONS)
    assert data.manifest["sources"]["lines"]["text_sha256"] != ""


def test_other_options_do_not_resume_unfinished_work(lines, tmp_path):
    kill(lines, tmp_path / "out", 3 * STEP)
    other = PrepareOptions(vocab_size=384, validation_fraction=0.2)
    prepare(file_sources([str(lines)]), tmp_path / "out", other)
    prepare(file_sources([str(lines)]), tmp_path / "clean", other)
    assert digest(tmp_path / "out") == digest(tmp_path / "clean")
