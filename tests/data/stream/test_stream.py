"""The stream: a pure function of (seed, sample number), for any number of readers and batch size."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.blend import Phase
from fourbits.data.stream.dataset import DEMO_PHASES, default_phases
from fourbits.data.stream.stream import PhasedStream
from fourbits.data.stream.token_file import TokenFile, id_type

SEQ_LEN = 8
TOKENS = {"code": 1000, "prose": 203}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, TokenFile]:
    """Two sources whose tokens count up, code from 0, prose from 5000: a sample shows where it was read."""
    folder: Path = tmp_path_factory.mktemp("tokens")
    for name, first in (("code", 0), ("prose", 5000)):
        with TokenFileWriter(folder / name, id_type(6000)) as writer:
            writer.add(np.arange(first, first + TOKENS[name]))
    return {name: TokenFile(folder / name) for name in TOKENS}


def stream(files, total=300, seed=1, phases=DEMO_PHASES, **options) -> PhasedStream:
    return PhasedStream(files, phases, total_samples=total, seq_len=SEQ_LEN, seed=seed, **options)


def test_a_sample_is_a_window_of_its_source(files):
    samples = stream(files).batch(0, 300)
    assert samples.dtype == np.int64
    assert samples.shape == (300, SEQ_LEN + 1)
    assert (np.diff(samples, axis=1) == 1).all()


def windows_read(files, total: int, source: str, seed: int = 1) -> list[int]:
    """Offsets of the samples of one source in its file, in the order of the run."""
    first = stream(files, total, seed).batch(0, total)[:, 0]
    return (first[first >= 5000] - 5000 if source == "prose" else first[first < 5000]).tolist()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**63), total=st.integers(100, 900))
def test_each_epoch_reads_every_window_once_across_phases(files, seed, total):
    for source, tokens in TOKENS.items():
        per_epoch = (tokens - 1) // SEQ_LEN
        starts = windows_read(files, total, source, seed)
        for begin in range(0, len(starts), per_epoch):
            epoch = starts[begin : begin + per_epoch]
            offset = epoch[0] % SEQ_LEN
            assert {start % SEQ_LEN for start in epoch} == {offset}
            assert len(set(epoch)) == len(epoch)
            assert max(epoch) + SEQ_LEN < tokens
            if len(epoch) == per_epoch:
                assert sorted(epoch) == [offset + number * SEQ_LEN for number in range(per_epoch)]


def test_the_remainder_of_a_file_is_read_in_some_epoch(files):
    # prose: 25 windows of 8 cover 201 of 203 tokens, so an epoch's first window begins at token 0, 1 or 2.
    starts = windows_read(files, 3000, "prose")
    assert {start % SEQ_LEN for start in starts} == {0, 1, 2}


def test_epochs_are_shuffled_differently(files):
    starts = windows_read(files, 900, "prose")
    assert [s // SEQ_LEN for s in starts[:25]] != [s // SEQ_LEN for s in starts[25:50]]


@settings(deadline=None)
@given(data=st.data(), total=st.integers(1, 200))
def test_any_division_into_batches_reads_the_same_samples(files, data, total):
    whole = stream(files, total).batch(0, total)
    reader = stream(files, total)
    done = 0
    while done < total:
        count = data.draw(st.integers(1, total - done))
        assert np.array_equal(reader.batch(done, count), whole[done : done + count])
        done += count


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_ranks_and_micro_batches_share_the_samples_without_loss_or_repetition(files, ranks, micro_batch):
    total = 240
    whole = stream(files, total).batch(0, total)
    seen = np.zeros(total, dtype=int)
    readers = [stream(files, total) for _ in range(ranks)]  # one object per rank, as in separate processes
    for first in range(0, total, ranks * micro_batch):
        for rank, reader in enumerate(readers):
            numbers = np.arange(first + rank * micro_batch, min(first + (rank + 1) * micro_batch, total))
            assert np.array_equal(reader.gather(numbers), whole[numbers])
            seen[numbers] += 1
    assert (seen == 1).all()


@st.composite
def runs(draw):
    """Phases with any boundaries and weights; parts of a run, each with its own ranks and micro-batches."""
    ends = sorted(draw(st.sets(st.integers(1, 19), max_size=3)))
    shares = [draw(st.integers(0, 20)) / 20 for _ in range(len(ends) + 1)]
    phases = [
        Phase(until=end / 20, weights={"code": share, "prose": 1 - share})
        for end, share in zip([*ends, 20], shares, strict=True)
    ]
    parts = draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 5), st.integers(1, 6)), max_size=4)
    )
    return phases, draw(st.integers(20, 400)), parts


@settings(deadline=None, max_examples=60)
@given(run=runs())
def test_no_sample_is_lost_or_repeated_whatever_the_phases_ranks_and_restarts(files, run):
    phases, total, parts = run
    whole = stream(files, total, phases=phases).batch(0, total)
    seen, done = np.zeros(total, dtype=int), 0
    # Each part: `ranks` processes that start where the previous ones were killed, and run `steps` steps.
    for ranks, micro_batch, steps in [*parts, (3, 2, total)]:
        readers = [stream(files, total, phases=phases) for _ in range(ranks)]
        for _ in range(steps):
            for reader in readers:
                count = min(micro_batch, total - done)
                if count:
                    assert np.array_equal(reader.batch(done, count), whole[done : done + count])
                seen[done : done + count] += 1
                done += count
    assert (seen == 1).all()
    # Each source was read window by window, none twice in an epoch, straight across the phases.
    for first, tokens in ((0, TOKENS["code"]), (5000, TOKENS["prose"])):
        mine = whole[(whole[:, 0] >= first) & (whole[:, 0] < first + 2000), 0] - first
        per_epoch = (tokens - 1) // SEQ_LEN
        for begin in range(0, len(mine), per_epoch):
            epoch = mine[begin : begin + per_epoch]
            assert len(set(epoch.tolist())) == len(epoch)


def test_a_restart_at_any_sample_continues_the_same_stream(files):
    whole = stream(files).batch(0, 300)
    for restart in (0, 1, 209, 210, 211, 269, 270, 299):  # both phase boundaries and their neighbours
        assert np.array_equal(stream(files).batch(restart, 300 - restart), whole[restart:])
        assert np.array_equal(stream(files).sample(restart), whole[restart])


def test_batches_can_cross_cached_blocks(files):
    reader = stream(files, 9000)
    assert np.array_equal(reader.batch(4090, 12), reader.gather(np.arange(4090, 4102)))
    assert np.array_equal(reader.batch(4000, 5000), reader.gather(np.arange(4000, 9000)))


def test_another_seed_reads_the_same_windows_in_another_order(files):
    one, two = windows_read(files, 300, "code", 1)[:124], windows_read(files, 300, "code", 2)[:124]
    assert one != two
    assert {s // SEQ_LEN for s in one} == {s // SEQ_LEN for s in two} == set(range(124))


def test_another_source_does_not_reshuffle_the_others(files):
    alone = PhasedStream(
        {"prose": files["prose"]},
        [Phase(until=1.0, weights={"prose": 1.0})],
        total_samples=90,
        seq_len=8,
        seed=1,
    )
    assert alone.batch(0, 90)[:, 0].tolist() == [s + 5000 for s in windows_read(files, 300, "prose")[:90]]


def test_another_process_reads_the_same_stream(files):
    program = (
        "import hashlib\n"
        "from fourbits.data.stream.dataset import DEMO_PHASES\n"
        "from fourbits.data.stream.stream import PhasedStream\n"
        "from fourbits.data.stream.token_file import TokenFile\n"
        f"folder = {str(files['code'].prefix.parent)!r}\n"
        "files = {name: TokenFile(folder + '/' + name) for name in ('code', 'prose')}\n"
        "stream = PhasedStream(files, DEMO_PHASES, total_samples=300, seq_len=8, seed=1)\n"
        "print(hashlib.sha256(stream.batch(0, 300).tobytes()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == hashlib.sha256(stream(files).batch(0, 300).tobytes()).hexdigest()


def test_validation_is_the_same_for_every_seed_and_blend(files):
    one = stream(files, validation=files)
    two = stream(files, seed=9, phases=default_phases(files), total=7, validation=files)
    assert np.array_equal(one.validation("prose"), two.validation("prose"))
    assert one.validation("prose")[:, 0].tolist() == [5000 + 8 * number for number in range(25)]
    assert one.validation("prose", limit=5)[:, 0].tolist() == [
        5000 + 8 * number for number in (0, 5, 10, 15, 20)
    ]
    assert len(one.validation("prose", limit=99)) == 25


def test_describe_counts_epochs_and_phases(files):
    plan = stream(files, 300).describe()
    assert [phase["end_sample"] for phase in plan["phases"]] == [210, 270, 300]
    assert plan["phases"][1]["cursors_at_start"] == {"code": 147, "prose": 63}
    assert plan["sources"]["code"]["samples_read"] == 147 + 30 + 9
    assert plan["sources"]["prose"]["epochs"] == (63 + 30 + 21) / 25


def test_sources_that_are_read_more_than_once_are_reported(files):
    # code: 124 windows, prose: 25; in the demo's blend 300 samples are 186 + 114, and 66 are 41 + 25.
    assert "reads code 1.50 times, prose 4.56 times (data.max_epochs" in stream(files, 300).repetition()
    assert stream(files, 66).describe()["sources"]["prose"]["samples_read"] == 25
    assert stream(files, 66).repetition() == ""
    assert "reads prose 1.04 times" in stream(files, 69).repetition()


def test_the_default_blend_is_proportional_to_size(files):
    [phase] = default_phases({"one": files["code"], "two": files["prose"]})
    assert phase.weights["one"] / phase.weights["two"] == pytest.approx(1000 / 203)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total": 0}, "at least 1 sample"),
        ({"batch_size": 150}, "smaller than one batch: 149 sequences of 8 tokens, one batch needs 150"),
        ({"max_epochs": 3}, "phase 2 exceeds max_epochs for 'prose': the run reads it 4.56 times"),
    ],
)
def test_a_run_that_needs_more_text_is_rejected(files, options, message):
    with pytest.raises(ValueError, match=message):
        stream(files, **options)


def test_a_source_shorter_than_a_sample_is_rejected(files):
    with pytest.raises(
        ValueError, match="'prose' has 203 tokens, fewer than one sample of seq_len \\+ 1 = 204"
    ):
        PhasedStream(files, DEMO_PHASES, total_samples=10, seq_len=203, seed=0)


def test_samples_outside_the_run_are_rejected(files):
    reader = stream(files)
    for first, count in ((-1, 1), (300, 1), (299, 2)):
        with pytest.raises(ValueError, match=r"samples must be in \[0, 300\)"):
            reader.batch(first, count)


def test_the_error_names_a_token_outside_the_vocabulary_and_its_position(files):
    reader = stream(files, vocab_size=5100)
    with pytest.raises(
        ValueError, match=r"prose\.bin: token \d+ at position (\d+) is outside the vocabulary of 5100"
    ):
        reader.batch(0, 300)
    assert stream(files, vocab_size=5203).batch(0, 300).max() == 5202


def test_validation_text_of_an_unknown_source_is_rejected(files):
    with pytest.raises(ValueError, match="no validation text for 'poems'"):
        stream(files, validation=files).validation("poems")
