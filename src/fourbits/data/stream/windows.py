"""The samples of one source: windows of its token file, in another order in every epoch.

A sample is seq_len + 1 ids. The samples of a source are consecutive windows of its token file, `size` of them
in one epoch; its k-th sample is window shuffle(k mod size) of epoch k div size, with another shuffle in every
epoch. A file is rarely a whole number of windows long; where the first window begins within what is left over
(less than seq_len ids) is drawn anew for each epoch, so that no text is left out for good. Validation reads
the windows in the order of the file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fourbits.data.stream.shuffle import derive_keys, permute
from fourbits.data.stream.token_file import TokenFile

Int64 = npt.NDArray[np.int64]

_OFFSET_KEY = 0x0FF5E7


@dataclass(frozen=True, slots=True)
class Windows:
    """The samples of one source, without end: index k -> where its window starts in the token file."""

    file: TokenFile
    seq_len: int
    key: int

    @property
    def size(self) -> int:
        """Windows in one epoch."""
        return (self.file.num_tokens - 1) // self.seq_len

    @property
    def slack(self) -> int:
        """Ids that one epoch leaves unread, fewer than seq_len."""
        return self.file.num_tokens - 1 - self.size * self.seq_len

    def starts(self, index: Int64) -> Int64:
        """First id of each window. index: int64 [n] -> int64 [n]."""
        epoch, position = np.divmod(index, np.int64(self.size))
        keys = derive_keys(self.key, epoch)
        offset = derive_keys(self.key ^ _OFFSET_KEY, epoch) % np.uint64(self.slack + 1)
        return permute(position, self.size, keys) * self.seq_len + offset.astype(np.int64)


def validation_samples(source: str, file: TokenFile, seq_len: int, limit: int | None = None) -> Int64:
    """Samples of a validation file in its order, evenly thinned to `limit`. -> int64 [n, seq_len + 1]."""
    size = (long_enough(source, file, seq_len, "validation text").num_tokens - 1) // seq_len
    kept = size if limit is None else min(limit, size)
    windows = np.arange(kept, dtype=np.int64) * size // max(kept, 1)
    return copied([file] * kept, windows * seq_len, seq_len + 1)


def copied(files: Sequence[TokenFile], start: Int64, width: int) -> Int64:
    """`width` ids of each file from its start on. -> int64 [files, width]."""
    batch, firsts = np.empty((len(files), width), dtype=np.int64), start.tolist()
    for file, first in zip(files, firsts, strict=True):
        file.will_need(first, width)
    for row, file, first in zip(batch, files, firsts, strict=True):
        row[:] = file.tokens[first : first + width]
    return batch


def long_enough(name: str, file: TokenFile, seq_len: int, kind: str) -> TokenFile:
    """The file, if it has a whole sample. Raises ValueError if not."""
    if file.num_tokens < seq_len + 1:
        raise ValueError(
            f"data: the {kind} of {name!r} has {file.num_tokens} ids, fewer than one sample of seq_len + 1 = "
            f"{seq_len + 1}. Add text or lower seq_len."
        )
    return file
