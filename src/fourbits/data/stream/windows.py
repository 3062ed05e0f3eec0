"""The samples of one source: windows of its token file, in a different order in each epoch.

A sample is seq_len + 1 tokens. An epoch of a source is `size` consecutive windows of its token file; sample k
is window shuffle(k mod size) of epoch k div size, and each epoch has a different shuffle. A file is rarely a
whole number of windows long, so each epoch draws the offset of its first window from the remainder (fewer
than seq_len tokens), so no text is skipped forever. Validation reads the windows in file order.
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
    """The endless samples of one source: index k -> where its window starts in the token file."""

    file: TokenFile
    seq_len: int
    key: int

    @property
    def size(self) -> int:
        """Windows per epoch."""
        return (self.file.num_tokens - 1) // self.seq_len

    @property
    def slack(self) -> int:
        """Tokens that an epoch does not read, fewer than seq_len."""
        return self.file.num_tokens - 1 - self.size * self.seq_len

    def starts(self, index: Int64) -> Int64:
        """Offset of the first token of each window. index: int64 [n] -> int64 [n]."""
        epoch, position = np.divmod(index, np.int64(self.size))
        keys = derive_keys(self.key, epoch)
        offset = derive_keys(self.key ^ _OFFSET_KEY, epoch) % np.uint64(self.slack + 1)
        return permute(position, self.size, keys) * self.seq_len + offset.astype(np.int64)


def validation_samples(source: str, file: TokenFile, seq_len: int, limit: int | None = None) -> Int64:
    """Samples of a validation file in file order, at most `limit`, evenly spaced: int64 [n, seq_len + 1]."""
    size = (require_one_sample(source, file, seq_len, "validation text").num_tokens - 1) // seq_len
    count = size if limit is None else min(limit, size)
    windows = np.arange(count, dtype=np.int64) * size // max(count, 1)
    return read_windows([file] * count, windows * seq_len, seq_len + 1)


def read_windows(files: Sequence[TokenFile], start: Int64, width: int) -> Int64:
    """Read `width` tokens of each file from its start offset. Returns int64 [files, width]."""
    batch, firsts = np.empty((len(files), width), dtype=np.int64), start.tolist()
    for file, first in zip(files, firsts, strict=True):
        file.will_need(first, width)
    for row, file, first in zip(batch, files, firsts, strict=True):
        row[:] = file.tokens[first : first + width]
    return batch


def require_one_sample(name: str, file: TokenFile, seq_len: int, kind: str) -> TokenFile:
    """Return the file. Raises ValueError if it is shorter than one sample."""
    if file.num_tokens < seq_len + 1:
        raise ValueError(
            f"the {kind} of {name!r} has {file.num_tokens} tokens, fewer than one sample of "
            f"seq_len + 1 = {seq_len + 1}. Add text or lower seq_len."
        )
    return file
