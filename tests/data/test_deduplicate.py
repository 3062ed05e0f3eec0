"""Repeated documents are left out, once, whatever source they come from; others never are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourbits.data.corpus import Document
from fourbits.data.deduplicate import Deduplicator, HashSet, normalized
from fourbits.data.prepare import PrepareOptions, prepare
from fourbits.data.sources import file_sources

VALUES = st.integers(1, 2**64 - 1) | st.integers(1, 8) | st.integers(1, 8).map(lambda n: n << 10)


@given(st.lists(VALUES, max_size=3000))
def test_the_table_is_a_set(values):
    table, expected = HashSet(), set()
    for value in values:
        assert table.add(value) == (value not in expected)
        expected.add(value)
    assert len(table) == len(expected)


def test_a_table_that_has_grown_still_knows_all_it_met():
    table = HashSet()
    # Many values that begin at the same slot: i + 2^20 j.
    values = [1 + i + (j << 20) for i in range(10) for j in range(100)]
    assert all(table.add(value) for value in values)
    assert not any(table.add(value) for value in values)
    assert len(table) == len(values)


def test_lines_are_compared_without_case_spacing_and_blank_lines():
    assert normalized("A  b\t c \r\n\r\n  D\n") == normalized("a B C\nd") == "a b c\nd"
    assert normalized("ab\nc") != normalized("ab c")


def document(text: str, more: bool = False, key: str = "key") -> Document:
    return Document("name", text, key, more=more)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("none", "a a A b"), ("exact", "a A b"), ("lines", "a b")],
)
def test_each_rule_keeps_the_first(rule, kept):
    repeated = Deduplicator(rule)
    assert [text for text in "aaAb" if not repeated.is_repeated(document(text))] == kept.split()
    assert repeated.documents == repeated.num_bytes == 4 - len(kept.split())


def test_pieces_of_a_long_document_go_together():
    repeated = Deduplicator("exact")
    once = [document("a", more=True, key="k"), document("b", more=True, key="k"), document("a", key="k")]
    other = [document("a", more=True, key="l"), document("b", key="l")]
    dropped = [repeated.is_repeated(piece) for piece in [*once, *other, *once, document("c")]]
    assert dropped == [False] * 3 + [False] * 2 + [True] * 3 + [False]
    assert (repeated.documents, repeated.num_bytes) == (1, 3)


def test_a_copy_in_a_later_source_is_left_out_and_counted(tmp_path):
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
