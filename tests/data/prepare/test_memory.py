"""Preparing uses memory for the batches in flight, not in proportion to the input."""

import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

# A word-level tokenizer is much faster than BPE, so the test can prepare more text.
PROGRAM = """
import resource, sys
from fourbits.data.corpora.document import Document, Source
from fourbits.data.prepare.prepare import PrepareOptions, prepare
folder, mebibytes, rule = sys.argv[1], int(sys.argv[2]), sys.argv[3]
line = "some words of a text that is of no use to anybody " * 160
def read():
    for number in range(mebibytes << 7):
        yield Document(str(number), f"{number} {line}", str(number))
options = PrepareOptions(tokenizer=folder + "/tokenizer.json", deduplicate=rule)
prepare([Source("x", (), read)], f"{folder}/out{mebibytes}", options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture
def folder(tmp_path):
    words = [
        "some",
        "words",
        "of",
        "a",
        "text",
        "that",
        "is",
        "no",
        "use",
        "to",
        "anybody",
        "<|endoftext|>",
        "<unk>",
    ]
    inner = tokenizers.Tokenizer(models.WordLevel(dict(zip(words, range(len(words)), strict=True)), "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def peak_kib(folder, mebibytes: int, rule: str) -> int:
    argv = [sys.executable, "-c", PROGRAM, str(folder), str(mebibytes), rule]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def test_peak_memory_does_not_grow_with_the_input(folder):
    """What may grow: 8 to 32 bytes per document in the hash set, 4 in the lengths; here 0.2 MiB.

    What must not grow: text, 48 MiB more of it, or its tokens, 20 MiB. A third of the text is far above the
    former, and leaves room for an allocator that keeps a batch of encodings.
    """
    small, large = peak_kib(folder, 16, "exact"), peak_kib(folder, 64, "exact")
    assert large - small < 16 << 10
