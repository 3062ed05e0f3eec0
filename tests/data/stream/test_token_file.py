"""Token files: the bytes of Megatron's format, complete or absent, and errors for every kind of damage."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.token_file import TokenFile, id_type

UINT16, INT32 = id_type(1000), id_type(100_000)


def write(prefix, documents, dtype=UINT16):
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
    return TokenFile(prefix)


def test_the_bytes_of_a_small_file_by_hand(tmp_path):
    write(tmp_path / "x", [[7, 8, 9], [1]])
    assert (tmp_path / "x.bin").read_bytes() == bytes([7, 0, 8, 0, 9, 0, 1, 0])
    assert (tmp_path / "x.idx").read_bytes() == b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", 1),  # version
            bytes([8]),  # uint16
            struct.pack("<QQ", 2, 3),  # sequences, documents + 1
            struct.pack("<2i", 3, 1),  # lengths
            struct.pack("<2q", 0, 6),  # byte offsets
            struct.pack("<3q", 0, 1, 2),  # document index
        ]
    )


def test_a_large_vocabulary_is_stored_as_int32(tmp_path):
    write(tmp_path / "x", [[131_071, 65_536]], INT32)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<2i", 131_071, 65_536)
    assert (tmp_path / "x.idx").read_bytes()[17] == 4
    assert id_type(65_499) == np.uint16
    assert id_type(65_500) == np.int32


@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=9), min_size=1, max_size=9),
    dtype=st.sampled_from([UINT16, INT32]),
)
def test_files_are_read_as_written(tmp_path_factory, documents, dtype):
    file = write(tmp_path_factory.mktemp("files") / "a.b", documents, dtype)
    assert file.tokens.tolist() == [token for document in documents for token in document]
    assert file.lengths.tolist() == [len(document) for document in documents]
    assert [file.document(i).tolist() for i in range(file.num_documents)] == documents
    assert file.dtype == dtype


def test_documents_of_several_sequences_are_read_whole(tmp_path):
    # Megatron can split a document into sequences (sentences); here documents of 2 and 1 sequences.
    (tmp_path / "x.bin").write_bytes(struct.pack("<6H", 1, 2, 3, 4, 5, 6))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 3)
    body = struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 2, 6) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "x.idx").write_bytes(header + body)
    file = TokenFile(tmp_path / "x")
    assert [file.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5, 6]]
    assert file.lengths.tolist() == [3, 3]


def test_a_failed_write_leaves_the_earlier_pair(tmp_path):
    write(tmp_path / "x", [[1, 2]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="do not fit"):
        write(tmp_path / "x", [[3, 4, 5], [-1]])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_raises_and_leaves_no_files(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fourbits.data.prepare.token_writer.sync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x", [[1, 2]])
    assert list(tmp_path.iterdir()) == []


def change(path, edit):
    path.write_bytes(edit(path.read_bytes()))


@pytest.mark.parametrize(
    ("suffix", "edit", "message"),
    [
        ("bin", lambda b: b[:-2], "3 tokens found, x.idx lists 4"),
        ("bin", lambda b: b[:-1], "7 bytes is not a whole number of uint16 tokens"),
        ("bin", lambda b: b"", "empty"),
        ("idx", lambda b: b[:-8], "truncated, or of another format: 82 bytes expected, 74 found"),
        ("idx", lambda b: b[:20], "not a token index"),
        ("idx", lambda b: b"PARQUET" + b[7:], "not a token index"),
        ("idx", lambda b: b[:9] + b"\x02" + b[10:], "version must be 1, got 2"),
        ("idx", lambda b: b[:17] + b"\x07" + b[18:], r"uint16 \(code 8\) or int32 \(code 4\), got code 7"),
        ("idx", lambda b: b[:17] + b"\x04" + b[18:], "2 tokens found, x.idx lists 4"),
        ("idx", lambda b: b[:42] + b"\x02" + b[43:], "pointers do not tile"),
        ("idx", lambda b: b[:-8] + b"\x09" + b[-7:], "does not cover its 2 sequences"),
    ],
)
def test_the_error_names_the_damaged_file(tmp_path, suffix, edit, message):
    write(tmp_path / "x", [[7, 8, 9], [1]])
    change(tmp_path / f"x.{suffix}", edit)
    with pytest.raises(ValueError, match=message):
        TokenFile(tmp_path / "x")


def test_the_error_names_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"y\.idx: no such token file"):
        TokenFile(tmp_path / "y")


@pytest.mark.parametrize("ids", [[], [-1], [65_536]])
def test_tokens_that_do_not_fit_the_dtype_are_rejected(tmp_path, ids):
    with pytest.raises(ValueError, match=r"non-empty|do not fit"):
        write(tmp_path / "x", [ids])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_negative_token_is_rejected_in_any_dtype(tmp_path, dtype):
    with pytest.raises(ValueError, match="tokens -1 to 5 do not fit int32"):
        write(tmp_path / "x", [np.array([5, -1], dtype=dtype)], INT32)


def test_a_file_without_documents_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="at least one document"):
        write(tmp_path / "x", [])
    assert list(tmp_path.iterdir()) == []
