"""The stream of training samples: a pure function of (seed, sample number), whatever reads it.

A sample is seq_len + 1 ids: inputs are all but the last, targets all but the first. The blend says which
source a sample comes from and which of that source's samples it is (blend.py), and those are windows of its
token file in the order of a shuffle (windows.py).

Rank count, micro-batch size and restarts do not appear here: readers ask for sample numbers.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fourbits.data.stream.blend import Blend, Phase
from fourbits.data.stream.shuffle import derive_key
from fourbits.data.stream.token_file import TokenFile
from fourbits.data.stream.windows import Windows, copied, long_enough, validation_samples

Int64 = npt.NDArray[np.int64]

# Positions are planned for this many consecutive samples at once: a small batch then costs little but
# copying.
PLANNED_SAMPLES = 4096


class PhasedStream:
    """Samples 0 .. total_samples - 1 of a run over `sources`, blended by `phases`.

    All methods are pure: the object holds no position, and any number of readers may share it.
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
        """vocab_size: ids from it on are an error when read; max_epochs: refuse to read a source more often.

        Raises ValueError for a source shorter than a sample, text shorter than a batch, impossible phases,
        and a plan that reads a source more than max_epochs times.
        """
        if seq_len < 1:
            raise ValueError(f"data: seq_len must be at least 1, got {seq_len}.")
        self.seq_len, self.seed, self.vocab_size = seq_len, seed, vocab_size
        self.validation_files = dict(validation or {})
        # Keyed by name, not by position: adding a source does not reshuffle the others.
        self.windows = [
            Windows(
                long_enough(name, file, seq_len, "text"),
                seq_len,
                derive_key(seed, zlib.crc32(name.encode())),
            )
            for name, file in sources.items()
        ]
        self.blend = Blend(list(sources), phases, total_samples)
        self._check_size(batch_size, max_epochs)
        self._planned: tuple[int, Int64, Int64] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def names(self) -> tuple[str, ...]:
        """The sources, in the order that source numbers refer to."""
        return self.blend.names

    @property
    def total_samples(self) -> int:
        """Samples in the run."""
        return self.blend.total_samples

    def sample(self, number: int) -> Int64:
        """One sample. -> int64 [seq_len + 1]."""
        return self.gather(np.array([number], dtype=np.int64))[0]

    def batch(self, first: int, count: int) -> Int64:
        """Samples first .. first + count - 1. -> int64 [count, seq_len + 1]."""
        self._check_range(first, first + count - 1)
        source, start = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            block, offset = divmod(first + done, PLANNED_SAMPLES)
            sources, starts = self._plan(block)
            take = min(count - done, PLANNED_SAMPLES - offset)
            source[done : done + take] = sources[offset : offset + take]
            start[done : done + take] = starts[offset : offset + take]
            done += take
        return self._read(source, start)

    def gather(self, samples: Int64) -> Int64:
        """Samples of any numbers, in any order. samples: int64 [n] -> int64 [n, seq_len + 1]."""
        if len(samples):
            self._check_range(int(samples.min()), int(samples.max()))
        return self._read(*self.locate(samples))

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Where samples come from. samples: int64 [n] -> (source number [n], first id in that file [n])."""
        source, cursor = self.blend.locate(samples)
        start = np.empty(len(samples), dtype=np.int64)
        for number, windows in enumerate(self.windows):
            mine = np.flatnonzero(source == number)
            if mine.size:
                start[mine] = windows.starts(cursor[mine])
        return source, start

    def validation(self, source: str, limit: int | None = None) -> Int64:
        """The validation samples of a source, in file order, evenly thinned to `limit`.

        Depends on the validation file and seq_len only, never on seed, phases or recipe.
        -> int64 [n, seq_len + 1].
        """
        if source not in self.validation_files:
            raise ValueError(
                f"data: no validation text for {source!r}; there are {sorted(self.validation_files)}."
            )
        return validation_samples(source, self.validation_files[source], self.seq_len, limit)

    def rounding(self) -> str:
        """A sentence on how far shares are from the weights that were asked; "" if they are exact."""
        parts = [
            f"{phase.weights.error:.1e} in phase {number} (period {phase.weights.period:,})"
            for number, phase in enumerate(self.blend.phases, start=1)
            if phase.weights.error
        ]
        return f"shares of sources differ from their weights by at most {', '.join(parts)}" if parts else ""

    def repetition(self) -> str:
        """A sentence on the sources that the run reads more than once; "" if there is none."""
        ends = self.blend.cursors(self.total_samples)
        epochs = {n: ends[n] / windows.size for n, windows in zip(self.names, self.windows, strict=True)}
        parts = [f"{name} {count:.2f} times" for name, count in epochs.items() if count > 1]
        return f"the run reads {', '.join(parts)} (data.max_epochs sets a limit)" if parts else ""

    def describe(self) -> dict[str, Any]:
        """The plan in plain values, for a manifest: phases, boundaries, slots, rounding error, epochs."""
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

    def _plan(self, block: int) -> tuple[Int64, Int64]:
        planned = self._planned
        if planned[0] != block:
            first = block * PLANNED_SAMPLES
            last = min(first + PLANNED_SAMPLES, self.total_samples)
            planned = (block, *self.locate(np.arange(first, last, dtype=np.int64)))
            self._planned = planned  # replaced whole: another thread sees the old plan or the new one
        return planned[1], planned[2]

    def _read(self, source: Int64, start: Int64) -> Int64:
        # Before, so that a file that was cut is an error and not a signal that ends the process.
        for windows in self.windows:
            windows.file.check_unchanged()
        batch = copied([self.windows[number].file for number in source.tolist()], start, self.seq_len + 1)
        if self.vocab_size is not None and batch.size:
            self._check_ids(batch, source, start)
        return batch

    def _check_ids(self, batch: Int64, source: Int64, start: Int64) -> None:
        # Negative ids (int32 files) wrap to large ones, so that one comparison finds both kinds.
        if int(batch.view(np.uint64).max()) < (self.vocab_size or 0):
            return
        row, column = np.argwhere(batch.view(np.uint64) >= np.uint64(self.vocab_size or 0))[0]
        file = self.windows[source[row]].file
        raise ValueError(
            f"{file.prefix}.bin: id {batch[row, column]} at position {start[row] + column} is outside the "
            f"vocabulary of {self.vocab_size}: the file was made with another tokenizer."
        )

    def _check_range(self, low: int, high: int) -> None:
        if low < 0 or high >= self.total_samples:
            raise ValueError(f"data: samples {low} to {high} asked of a run of {self.total_samples} samples.")

    def _check_size(self, batch_size: int, max_epochs: float | None) -> None:
        available = sum(windows.size for windows in self.windows)
        if available < batch_size:
            raise ValueError(
                f"data: the text is smaller than one batch: {available} sequences of {self.seq_len} ids, "
                f"one batch takes {batch_size}. Add text, or lower the batch size or seq_len."
            )
        ends = self.blend.cursors(self.total_samples)
        for name, windows in zip(self.names, self.windows, strict=True):
            if max_epochs is not None and ends[name] > max_epochs * windows.size:
                number = self._first_phase_beyond(name, max_epochs * windows.size)
                raise ValueError(
                    f"data: phase {number} asks more of {name!r} than there is: the run reads it "
                    f"{ends[name] / windows.size:.2f} times, max_epochs is {max_epochs:g}. Add text to it, "
                    f"lower its weights, or raise max_epochs."
                )

    def _first_phase_beyond(self, name: str, samples: float) -> int:
        ends = [self.blend.cursors(phase.end)[name] for phase in self.blend.phases]
        return 1 + next(number for number, end in enumerate(ends) if end > samples)
