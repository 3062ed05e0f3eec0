"""The stream of training samples: a pure function of (seed, sample number), for every reader.

A sample is seq_len + 1 tokens: the inputs are all but the last, the targets all but the first. The blend
(blend.py) maps a sample number to a source and an index in it, which is a window of the source's token file,
in shuffled order (windows.py).

World size, micro-batch size and restarts do not appear here, because readers request samples by number.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fourbits.data.stream.blend import Blend, Phase
from fourbits.data.stream.shuffle import derive_key
from fourbits.data.stream.token_file import TokenFile
from fourbits.data.stream.windows import Windows, read_windows, require_one_sample, validation_samples

Int64 = npt.NDArray[np.int64]

# Positions are computed for this many consecutive samples at once, so a small batch costs little more than
# the copy.
CACHED_SAMPLES = 4096


class PhasedStream:
    """Samples 0 .. total_samples - 1 of a run over `sources`, blended by `phases`.

    All methods are pure: the object has no position, and any number of readers can share it.
    """

    def __init__(
        self,
        sources: Mapping[str, TokenFile],
        phases: Sequence[Phase],
        *,
        total_samples: int,
        seq_len: int,
        seed: int,
        batch_size: int = 1,
        vocab_size: int | None = None,
        validation: Mapping[str, TokenFile] | None = None,
        max_epochs: float | None = None,
    ) -> None:
        """vocab_size: tokens must be below it; max_epochs: limit on how often a source is read.

        Raises ValueError for a source shorter than a sample, text shorter than a batch, invalid phases, or
        phases that read a source more than max_epochs times.
        """
        if seq_len < 1:
            raise ValueError(
                f"seq_len must be at least 1, got {seq_len}. Set train.seq_len to the tokens of a sample, "
                "such as 4096."
            )
        self.seq_len, self.seed, self.vocab_size = seq_len, seed, vocab_size
        self.validation_files = dict(validation or {})
        # Keyed by name, not by index: adding a source does not reshuffle the others.
        self.windows = [
            Windows(
                require_one_sample(name, file, seq_len, "text"),
                seq_len,
                derive_key(seed, zlib.crc32(name.encode())),
            )
            for name, file in sources.items()
        ]
        self.blend = Blend(list(sources), phases, total_samples)
        self.max_epochs, self._beyond = max_epochs, 0
        self._check_size(batch_size)
        self._cached: tuple[int, Int64, Int64] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def names(self) -> tuple[str, ...]:
        """The source names, in the order of source numbers."""
        return self.blend.names

    @property
    def total_samples(self) -> int:
        """Samples in the run."""
        return self.blend.total_samples

    def read_beyond(self, samples: int) -> None:
        """Allow this many samples past the last one, by the weights of the last phase.

        Raises ValueError for a source that all of them would read more than max_epochs times.
        """
        self._check_epochs(self.total_samples + samples)
        self._beyond, self._cached = samples, (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def sample(self, number: int) -> Int64:
        """One sample. Returns int64 [seq_len + 1]."""
        return self.gather(np.array([number], dtype=np.int64))[0]

    def batch(self, first: int, count: int) -> Int64:
        """Samples first .. first + count - 1. Returns int64 [count, seq_len + 1]."""
        self._check_range(first, first + count - 1)
        source, start = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            block, offset = divmod(first + done, CACHED_SAMPLES)
            sources, starts = self._locations(block)
            take = min(count - done, CACHED_SAMPLES - offset)
            source[done : done + take] = sources[offset : offset + take]
            start[done : done + take] = starts[offset : offset + take]
            done += take
        return self._read(source, start)

    def gather(self, samples: Int64) -> Int64:
        """Any samples, in any order. samples: int64 [n] -> int64 [n, seq_len + 1]."""
        if len(samples):
            self._check_range(int(samples.min()), int(samples.max()))
        return self._read(*self.locate(samples))

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Where samples are read. samples: int64 [n] -> (source number [n], first token's offset [n])."""
        source, cursor = self.blend.locate(samples)
        start = np.empty(len(samples), dtype=np.int64)
        for number, windows in enumerate(self.windows):
            selected = np.flatnonzero(source == number)
            if selected.size:
                start[selected] = windows.starts(cursor[selected])
        return source, start

    def validation(self, source: str, limit: int | None = None) -> Int64:
        """The validation samples of a source in file order, int64 [n, seq_len + 1].

        limit: take this many, evenly spaced. They depend only on the validation file and seq_len, never on
        seed, phases or recipe.
        """
        if source not in self.validation_files:
            raise ValueError(
                f"no validation text for {source!r}; the sources are {sorted(self.validation_files)}."
            )
        return validation_samples(source, self.validation_files[source], self.seq_len, limit)

    def rounding(self) -> str:
        """A message about how far the shares are from the configured weights; "" if they are exact."""
        parts = [
            f"{phase.weights.error:.1e} in phase {number} (period {phase.weights.period:,})"
            for number, phase in enumerate(self.blend.phases, start=1)
            if phase.weights.error
        ]
        return f"shares of sources differ from their weights by at most {', '.join(parts)}" if parts else ""

    def repetition(self) -> str:
        """A message about the sources that the run reads more than once; "" if there are none."""
        ends = self.blend.cursors(self.total_samples)
        epochs = {n: ends[n] / windows.size for n, windows in zip(self.names, self.windows, strict=True)}
        parts = [f"{name} {count:.2f} times" for name, count in epochs.items() if count > 1]
        return f"the run reads {', '.join(parts)} (data.max_epochs sets a limit)" if parts else ""

    def describe(self) -> dict[str, Any]:
        """What the run reads, as plain values for its manifest: phases, slots, rounding error, epochs."""
        ends = self.blend.cursors(self.total_samples)
        phases = [
            {
                "first_sample": phase.first,
                "end_sample": phase.end,
                "period": phase.weights.period,
                "slots": phase.weights.slots,
                "rounding_error": phase.weights.error,
                "cursors_at_start": self.blend.cursors(phase.first),
            }
            for phase in self.blend.phases
        ]
        sources = {
            name: {
                "tokens": windows.file.num_tokens,
                "samples_per_epoch": windows.size,
                "samples_read": ends[name],
                "epochs": ends[name] / windows.size,
                "unread_ids_per_epoch": windows.slack,
            }
            for name, windows in zip(self.names, self.windows, strict=True)
        }
        run = {"seed": self.seed, "seq_len": self.seq_len, "total_samples": self.total_samples}
        return {**run, "phases": phases, "sources": sources}

    def _locations(self, block: int) -> tuple[Int64, Int64]:
        cached = self._cached
        if cached[0] != block:
            first = block * CACHED_SAMPLES
            last = min(first + CACHED_SAMPLES, self.total_samples + self._beyond)
            cached = (block, *self.locate(np.arange(first, last, dtype=np.int64)))
            self._cached = (
                cached  # one assignment, so another thread sees either the old block or the new one
            )
        return cached[1], cached[2]

    def _read(self, source: Int64, start: Int64) -> Int64:
        # Check first: reading a truncated file would kill the process with SIGBUS.
        for windows in self.windows:
            windows.file.check_unchanged()
        batch = read_windows(
            [self.windows[number].file for number in source.tolist()], start, self.seq_len + 1
        )
        if self.vocab_size is not None and batch.size:
            self._check_tokens(batch, source, start)
        return batch

    def _check_tokens(self, batch: Int64, source: Int64, start: Int64) -> None:
        # Negative tokens (int32 files) wrap to large values, so one comparison finds both kinds of error.
        if int(batch.view(np.uint64).max()) < (self.vocab_size or 0):
            return
        row, column = np.argwhere(batch.view(np.uint64) >= np.uint64(self.vocab_size or 0))[0]
        file = self.windows[source[row]].file
        raise ValueError(
            f"{file.prefix}.bin: token {batch[row, column]} at position {start[row] + column} is outside the "
            f"vocabulary of {self.vocab_size}. The file was written with another tokenizer."
        )

    def _check_range(self, low: int, high: int) -> None:
        end = self.total_samples + self._beyond
        if low < 0 or high >= end:
            raise ValueError(f"samples must be in [0, {end}), got {low} to {high}. Ask for those of the run.")

    def _check_size(self, batch_size: int) -> None:
        available = sum(windows.size for windows in self.windows)
        if available < batch_size:
            raise ValueError(
                f"the text is smaller than one batch: {available} sequences of {self.seq_len} tokens, "
                f"one batch needs {batch_size}. Add text, or lower the batch size or seq_len."
            )
        self._check_epochs(self.total_samples)

    def _check_epochs(self, samples: int) -> None:
        ends, limit = self.blend.cursors(samples), self.max_epochs
        for name, windows in zip(self.names, self.windows, strict=True):
            if limit is not None and ends[name] > limit * windows.size:
                number = self._first_phase_beyond(name, limit * windows.size)
                raise ValueError(
                    f"phase {number} exceeds max_epochs for {name!r}: the run reads it "
                    f"{ends[name] / windows.size:.2f} times, the limit is {limit:g}. Add text to it, "
                    f"lower its weights, or raise max_epochs."
                )

    def _first_phase_beyond(self, name: str, samples: float) -> int:
        ends = [self.blend.cursors(phase.end)[name] for phase in self.blend.phases]
        return 1 + next((number for number, end in enumerate(ends) if end > samples), len(ends) - 1)
