"""Duplicate documents are dropped, whatever source they come from; other documents never are."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourbits.data.corpora import deduplicate
from fourbits.data.corpora.deduplicate import Deduplicator, HashSet, normalized
from fourbits.data.corpora.document import Document
from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare.prepare import PrepareOptions, prepare

# Few enough to repeat, in the first part, in the last, and anywhere.
VALUES = st.integers(0, 40) | st.integers(2**64 - 40, 2**64 - 1) | st.integers(0, 2**64 - 1)


@given(st.lists(VALUES, max_size=300), st.integers(1, 9))
def test_a_hash_set_equals_a_set_however_often_it_merges(values, max_unsorted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deduplicate, "_MAX_UNSORTED", max_unsorted)
        hashes, expected = HashSet(), set()
        for value in values:
            assert (value in hashes) == (value in expected)
            assert hashes.add(value) == (value not in expected)
            expected.add(value)
        assert len(hashes) == len(expected)


def test_a_hash_set_uses_little_more_than_eight_bytes_per_hash():
    """Arrays over-allocate by a sixteenth; at most 1024 values are unsorted, at 128 bytes each or less."""
    tracemalloc.start()
    hashes, number = HashSet(), 400_000
    for value in range(number):
        hashes.add(value)  # all of them in one part
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 8 * number * 17 / 16 + (1 << 17)


def test_the_lines_rule_ignores_case_spacing_and_blank_lines():
    assert normalized("A  b\t c \r\n\r\n  D\n") == normalized("a B C\nd") == "a b c\nd"
    assert normalized("ab\nc") != normalized("ab c")


def document(text: str, more: bool = False, key: str = "key") -> Document:
    return Document("name", text, key, more=more)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("none", "a a A b"), ("exact", "a A b"), ("lines", "a b")],
)
def test_each_rule_keeps_the_first_copy(rule, kept):
    deduplicator = Deduplicator(rule)
    assert [text for text in "aaAb" if not deduplicator.is_duplicate(document(text))] == kept.split()
    assert deduplicator.documents == deduplicator.num_bytes == 4 - len(kept.split())


def test_pieces_of_a_long_document_are_kept_or_dropped_together():
    deduplicator = Deduplicator("exact")
    once = [document("a", more=True, key="k"), document("b", more=True, key="k"), document("a", key="k")]
    other = [document("a", more=True, key="l"), document("b", key="l")]
    dropped = [deduplicator.is_duplicate(piece) for piece in [*once, *other, *once, document("c")]]
    assert dropped == [False] * 3 + [False] * 2 + [True] * 3 + [False]
    assert (deduplicator.documents, deduplicator.num_bytes) == (1, 3)


def test_a_copy_in_a_later_source_is_dropped_and_counted(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number:02}.txt").write_text(f"{'Text' if number % 2 else name} {number}.\n")
    sources = file_sources([str(tmp_path / "one"), str(tmp_path / "two")])
    data = prepare(sources, tmp_path / "out", PrepareOptions(vocab_size=384, deduplicate="exact"))
    one, two = (data.manifest["sources"][name] for name in ("one", "two"))
    assert (one["documents"], one["repeated_documents"]) == (20, 0)
    assert (two["documents"], two["repeated_documents"]) == (10, 10)
    assert two["repeated_bytes"] == sum(len(f"Text {number}.\n") for number in range(1, 20, 2))
    assert data.manifest["deduplicate"] == "exact"
