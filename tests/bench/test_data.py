"""The data benchmark, on small files."""

import os

import pytest

from fourbits.bench import data, data_files
from fourbits.data.stream.token_file import TokenFile


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data_files, "_MODULES", 4)
    monkeypatch.setattr(data_files, "_TOKENS", 1 << 19)
    monkeypatch.setattr(data, "_REPEATS", 1)
    monkeypatch.setattr(data, "_WARM_BATCHES", 5)
    monkeypatch.setattr(data, "_COLD_BATCHES", 2)
    monkeypatch.setattr(data, "_STEP_BATCHES", 3)


def test_preparation_is_measured_in_every_container_and_against_encode_batch_and_datasets(tmp_path):
    results = data._prepare_results(tmp_path)
    names = [result.name for result in results]
    kinds = ["text", "jsonl", "gz", "zst", "parquet"]
    assert names == ["bare encode_batch", *(f"prepare {kind}" for kind in kinds), "prepare jsonl"]
    assert [result.goal for result in results] == [None, 0.75, 0.75, None, None, None, None]
    bare = results[0]
    for result in results[1:6]:
        assert result.value == pytest.approx(bare.seconds / result.seconds)
    # Every container was prepared to the same tokens.
    files = [TokenFile(tmp_path / f"out{number}" / "x.train") for number in range(5)]
    assert len({file.num_tokens for file in files}) == 1


def test_reading_is_measured_from_memory_from_disk_and_against_megatron_core(tmp_path):
    results = {(result.name, result.unit): result for result in data._read_results(tmp_path)}
    assert results["read from memory, one core", "M tokens/s"].goal == 50
    assert results["read from disk", "M tokens/s"].ceiling is not None
    assert results["first batch of 1e9 tokens, 1e6 documents", "of the 1 s allowed"].value > 1
    assert ("read from memory", "of megatron-core's GPTDataset") in results


def test_a_sparse_index_is_a_token_file(tmp_path):
    file = TokenFile(data_files.sparse_index(tmp_path, documents=30, length=10))
    assert (file.num_documents, file.num_tokens) == (30, 300)
    assert file.lengths.tolist() == [10] * 30


def test_a_system_that_cannot_drop_the_page_cache_is_said_to_have_read_from_it(tmp_path, monkeypatch):
    """As on macOS, whose Python has neither of these."""
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.delattr(os, "POSIX_FADV_DONTNEED", raising=False)
    result = data._cold_result(data_files.token_file(tmp_path, 8192))
    assert result.name == "read from disk or its cache, which this system does not drop"
