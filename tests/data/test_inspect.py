"""Inspection reports what a run reads, and errors name files that change or hold wrong tokens."""

import os

import numpy as np
import pytest

from fourbits.data.corpora.sources import file_sources
from fourbits.data.inspect import duplicate_documents, length_quantiles, phase_reads, sample_locations
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.blend import Phase
from fourbits.data.stream.dataset import DEMO_PHASES
from fourbits.data.stream.stream import PhasedStream
from fourbits.data.stream.token_file import TokenFile, id_type

SEQ_LEN, STEP = 8, 4


def write(prefix, documents, vocabulary=6000) -> TokenFile:
    with TokenFileWriter(prefix, id_type(vocabulary)) as writer:
        for document in documents:
            writer.add(document)
    return TokenFile(prefix)


@pytest.fixture
def files(tmp_path) -> dict[str, TokenFile]:
    code = [np.arange(first, first + 50) for first in range(0, 1000, 50)]
    prose = [np.arange(first, first + 29) for first in range(5000, 5203, 29)]
    return {"code": write(tmp_path / "code", code), "prose": write(tmp_path / "prose", prose)}


def stream(files, total=300, **options) -> PhasedStream:
    return PhasedStream(files, DEMO_PHASES, total_samples=total, seq_len=SEQ_LEN, seed=1, **options)


def test_the_phases_count_the_samples_that_the_stream_returns(files):
    reader = stream(files)
    phases = phase_reads(reader, STEP)
    assert [(p.first_step, p.end_step) for p in phases] == [(0, 53), (52, 68), (67, 75)]  # 210 = 52.5 steps
    for phase in phases:
        first = reader.batch(phase.first_sample, phase.end_sample - phase.first_sample)[:, 0]
        assert phase.sources["prose"].samples == int((first >= 5000).sum())
        assert phase.sources["code"].tokens == int((first < 5000).sum()) * SEQ_LEN
    assert phases[-1].sources["prose"].epochs == sum(p.sources["prose"].samples for p in phases) / 25


def test_the_rounding_of_weights_is_reported_only_if_there_is_any(files):
    assert stream(files).rounding() == ""
    third = [Phase(until=1.0, weights={"code": 0.123456789, "prose": 1 - 0.123456789})]
    reader = PhasedStream(files, third, total_samples=50, seq_len=SEQ_LEN, seed=1)
    error = abs(round(0.123456789 * 65_536) / 65_536 - 0.123456789)
    assert f"by at most {error:.1e} in phase 1 (period 65,536)" in reader.rounding()


def test_sample_locations_are_where_the_stream_reads(files):
    reader = stream(files)
    for row, sample in zip(sample_locations(reader, 200, 30), reader.batch(200, 30), strict=True):
        file = files[row["source"]]
        assert file.tokens[row["begin"] : row["end"]].tolist() == sample.tolist()
        first, last = row["documents"]
        assert sample[0] in file.document(first)
        assert sample[-1] in file.document(last)
        assert last - first <= 1


def test_every_token_is_found_in_its_document(files):
    file = files["prose"]
    found = [file.document_at(position) for position in range(file.num_tokens)]
    assert found == [number for number, length in enumerate(file.lengths) for _ in range(length)]
    with pytest.raises(ValueError, match="position must be in \\[0, 203\\), got 203"):
        file.document_at(203)


def test_quantiles_of_lengths(tmp_path):
    file = write(tmp_path / "x", [[1] * length for length in range(1, 102)])
    assert length_quantiles(file) == {"0": 1, "0.5": 51, "0.9": 91, "0.99": 100, "1": 101}


def test_duplicates_are_counted_within_training_and_between_training_and_validation(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(60):
        (tmp_path / "a" / f"{number:02}.txt").write_text(f"Text number {number % 50}.\n")
    data = prepare(file_sources([str(tmp_path / "a")]), tmp_path / "out", PrepareOptions(vocab_size=384))
    found = duplicate_documents(data)
    held_out = data.validation["a"].num_documents
    distinct = len({tuple(data.validation["a"].document(n).tolist()) for n in range(held_out)})
    # Ten texts appear twice; copies fall on the same side of the split.
    assert found["train"]["a"].documents == 10 - (held_out - distinct)
    assert found["validation"]["a"].documents == 0
    leaky = type(data)(data.folder, data.manifest, data.tokenizer, data.train, data.train)
    assert duplicate_documents(leaky)["validation"]["a"].documents == data.train["a"].num_documents


def test_validation_samples_depend_on_the_file_and_length_only(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"Line {number} of a text.\n" for number in range(900)))
    data = prepare(file_sources([str(tmp_path / "a.txt")]), tmp_path / "out", PrepareOptions(vocab_size=384))
    options = {"total_samples": 50, "seq_len": 16, "seed": 3}
    run = data.stream([Phase(until=1.0, weights={"a": 1.0})], **options)
    for limit in (None, 5):
        assert data.validation_samples(16, limit)["a"].tolist() == run.validation("a", limit).tolist()


def test_checking_all_tokens_finds_one_outside_the_vocabulary(tmp_path):
    file = write(tmp_path / "x", [[1, 2, 3], [4, 500, 6]])
    file.check_tokens(501)
    with pytest.raises(ValueError, match=r"x\.bin: token 500 at position 4 is outside the vocabulary of 500"):
        file.check_tokens(500)
    signed = write(tmp_path / "y", [[1, 70_000]], 131_072)
    raw = np.fromfile(tmp_path / "y.bin", dtype="<i4")
    raw[0] = -7
    raw.tofile(tmp_path / "y.bin")
    with pytest.raises(ValueError, match=r"y\.bin: token -7 at position 0"):
        TokenFile(signed.prefix).check_tokens(131_072)


@pytest.mark.parametrize("change", ["cut", "overwritten", "replaced", "removed"])
def test_the_error_names_a_file_that_changes_during_the_run(files, tmp_path, change):
    reader, path = stream(files), tmp_path / "prose.bin"
    before = reader.batch(0, 8)
    raw = path.read_bytes()
    if change == "cut":
        os.truncate(path, 10)
    elif change == "overwritten":
        with path.open("r+b") as file:
            file.write(raw)
        os.utime(path, ns=(1, 1))
    elif change == "replaced":
        (tmp_path / "new").write_bytes(raw)
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"prose\.bin: changed while it was read"):
        reader.batch(8, 8)
    path.write_bytes(raw)
    fresh = {name: TokenFile(tmp_path / name) for name in files}
    assert stream(fresh).batch(0, 8).tolist() == before.tolist()


def test_the_error_names_the_phase_that_exceeds_max_epochs(files):
    stream(files, 130, max_epochs=2.0)
    with pytest.raises(
        ValueError, match=r"phase 3 exceeds max_epochs for 'prose': the run reads it 2.28 times"
    ):
        stream(files, 150, max_epochs=2.2)
    with pytest.raises(ValueError, match="phase 1 exceeds max_epochs for 'prose'"):
        stream(files, 300, max_epochs=2.0)
