"""Reads a Debian package without installing or unpacking it: an ar archive with a tar archive inside.

    "!<arch>\\n"   then for each member a 60-byte header (name: 16 bytes, size: 10 bytes at offset 48) and its
                  content, padded to an even length; the member data.tar.xz (.gz, .zst) holds the files

Members are streamed in the order they are stored, and nothing is written to disk. A tar archive inside the
package, as in source packages, is streamed too.
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any

from fourbits.data.optional import load_pyarrow

_MAGIC = b"!<arch>\n"
_HEADER, _HEADER_END = 60, b"`\n"
_NESTED = (".tar.xz", ".tar.gz", ".tar.bz2")

# keep(name, size): whether to read a file
FileFilter = Callable[[str, int], bool]


class Part(io.RawIOBase):
    """The next `size` bytes of an open file, as a file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        """Start at the file's current position."""
        self._file, self._left = file, size

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what is left, up to its length."""
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def files_of(path: Path, keep: FileFilter) -> Iterator[tuple[str, bytes, int]]:
    """Yield name, content, and bytes of the package read so far, for each file that `keep` accepts.

    Raises ValueError for a damaged package, or a file that is not one.
    """
    try:
        with path.open("rb") as raw, tarfile.open(fileobj=_data_member(raw, path), mode="r|*") as archive:
            for name, content in _members(archive, keep):
                yield name, content, raw.tell()
    except (tarfile.TarError, EOFError, OSError, LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated: {error}.") from error


def _members(archive: tarfile.TarFile, keep: FileFilter) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name = member.name.removeprefix("./")
        file = archive.extractfile(member) if member.isfile() else None
        if file is None:
            continue
        if name.endswith(_NESTED):
            with tarfile.open(fileobj=file, mode="r|*") as inner:
                yield from _members(inner, keep)
        elif keep(name, member.size):
            yield name, file.read()


def _data_member(raw: IO[bytes], path: Path) -> IO[bytes]:
    if raw.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{path}: not a Debian package: it must begin with !<arch>.")
    while len(header := raw.read(_HEADER)) == _HEADER:
        name, digits = header[:16].decode("ascii", "replace").strip().rstrip("/"), header[48:58].strip()
        if not digits.isdigit() or header[58:] != _HEADER_END:
            raise ValueError(
                f"{path}: damaged: the header of its member {name!r} must have a size, then a backquote "
                f"and a line break, got {header[48:]!r}. Download the package again."
            )
        size = int(digits)
        if name.startswith("data.tar"):
            part: Any = io.BufferedReader(Part(raw, size), 1 << 20)
            return load_pyarrow(path).CompressedInputStream(part, "zstd") if name.endswith(".zst") else part
        raw.seek(size + size % 2, io.SEEK_CUR)
    raise ValueError(f"{path}: damaged or truncated: it has no data.tar.")
