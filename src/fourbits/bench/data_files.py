"""Files for the data benchmark: the same texts in several containers, and token files of a given size."""

import gzip
import io
import json
import os
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fourbits.data.corpora.stdlib import stdlib_sources
from fourbits.data.optional import load_pyarrow
from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.token_file import HEADER, MAGIC, VERSION, id_type

SEQ_LEN = 2048
_MODULES = 400
_TOKENS = 64 << 20
_DOCUMENT = 512


def text_files(folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Texts of the standard library, and their paths as "text", "jsonl", "gz", "zst" and "parquet".

    The last two exist only if pyarrow is installed.
    """
    code, _ = stdlib_sources()
    texts = [document.text for document in islice(code.read(), _MODULES)]
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:04}.txt").write_text(text, encoding="utf-8")
    (folder / "x.jsonl").write_bytes(raw)
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(raw))
    found = {"text": folder / "texts", "jsonl": folder / "x.jsonl", "gz": folder / "x.jsonl.gz"}
    if find_spec("pyarrow"):
        arrow: Any = load_pyarrow("the benchmark")
        with arrow.CompressedOutputStream(str(folder / "x.jsonl.zst"), "zstd") as stream:
            stream.write(raw)
        arrow.parquet.write_table(arrow.table({"text": texts}), folder / "x.parquet")
        found |= {"zst": folder / "x.jsonl.zst", "parquet": folder / "x.parquet"}
    return texts, found


def token_file(folder: Path, vocabulary: int) -> Path:
    """A token file of 64 Mi random tokens in documents of 512."""
    generator = np.random.default_rng(0)
    with TokenFileWriter(folder / "tokens", id_type(vocabulary)) as writer:
        for _ in range(_TOKENS // _DOCUMENT):
            writer.add(generator.integers(0, vocabulary, _DOCUMENT, dtype=np.uint16))
    return folder / "tokens"


def sparse_index(folder: Path, documents: int, length: int) -> Path:
    """A token file of zeros that takes no disk space, with a complete index."""
    prefix = folder / "sparse"
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * documents * length)
    index = io.BytesIO()
    index.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
    index.write(np.full(documents, length, dtype="<i4").tobytes())
    index.write((np.arange(documents, dtype="<i8") * (2 * length)).tobytes())
    index.write(np.arange(documents + 1, dtype="<i8").tobytes())
    prefix.with_suffix(".idx").write_bytes(index.getvalue())
    return prefix


def evict(path: Path) -> bool:
    """Evict a file that is not mapped from the page cache. False where the system cannot, such as macOS."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
