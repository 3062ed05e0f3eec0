"""Walks a folder: which of its files are read, and how many are not, by extension."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from fourbits.data.corpora.document import SkippedFiles
from fourbits.data.corpora.file_kinds import SUPPORTED, kind_of, label_of
from fourbits.data.corpora.read_files import problem_of
from fourbits.data.whole_file import system_remedy

HIDDEN, CACHES, LINKS = "hidden", "caches", "links to files"
# Python's compiled modules, and folders with the tag of https://bford.info/cachedir, such as Cargo's target.
PYCACHE, TAG_FILE, TAG = "__pycache__", "CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55"
REMEDIES = {
    LINKS: "read links with --follow-links (data.follow_links)",
    "without a ": "choose a field or column with --text-field (data.text_field)",
    "": "continue without them with --allow-skipped (data.allow_skipped)",
}


@dataclass(slots=True)
class FolderFiles:
    """The files that are read, in order, and the skipped files, by extension."""

    read: list[Path] = field(default_factory=list)
    num_bytes: int = 0
    skipped: dict[str, SkippedFiles] = field(default_factory=dict)

    def skip(self, label: str, num_bytes: int = 0) -> None:
        """Count a file that is not read."""
        before = self.skipped.get(label, SkippedFiles(0, 0))
        self.skipped[label] = SkippedFiles(before.files + 1, before.num_bytes + num_bytes)


def find_files(folder: Path, text_field: str, *, follow_links: bool, allow_skipped: bool) -> FolderFiles:
    """The text files of a folder and its folders, in order of their paths.

    Hidden files and folders and caches are counted but not read, and their bytes are not the folder's. Links
    to folders are not followed; links to files are only with follow_links. Raises ValueError for a folder
    without text, or if most of its bytes would be skipped and allow_skipped is not set.
    """
    found = FolderFiles()
    for path in sorted(_walk(folder, found)):
        _classify(path, found, text_field, follow_links)
    skipped_bytes = sum(each.num_bytes for each in found.skipped.values())
    if not found.read:
        raise ValueError(_without_text(folder, found.skipped))
    if not found.num_bytes:
        raise ValueError(f"{folder}: every text file in this folder is empty ({len(found.read)} in all).")
    if skipped_bytes > found.num_bytes and not allow_skipped:
        raise ValueError(
            f"{folder}: most of this folder, {_size(skipped_bytes)} of "
            f"{_size(skipped_bytes + found.num_bytes)}, would be skipped: "
            f"{listed(found.skipped)}. Supported: {SUPPORTED}. Convert these files, or "
            f"{_remedies(found.skipped)}."
        )
    return found


def listed(skipped: Mapping[str, SkippedFiles]) -> str:
    """The skipped files in one line, the largest first: ".png: 3 (1.2 MB); .bin: 1 (80 bytes)"."""
    rows = sorted(skipped.items(), key=lambda item: (-item[1].num_bytes, item[0]))
    return "; ".join(
        f"{label}: {each.files:,}" + (f" ({_size(each.num_bytes)})" if each.num_bytes else "")
        for label, each in rows
    )


def _walk(folder: Path, found: FolderFiles) -> Iterator[Path]:
    """Yield every file that is neither hidden nor in a cache, and count the rest."""
    for top, folders, files in os.walk(folder, onerror=_refuse):
        for name in (*folders, *files):
            path = Path(top, name)
            if name.startswith("."):
                found.skip(HIDDEN)
            elif name in files:
                yield path
            elif path.is_symlink():
                found.skip("links to folders")
            elif _is_cache(path):
                found.skip(CACHES)
                folders.remove(name)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _is_cache(folder: Path) -> bool:
    """Whether a folder is a cache that a program can recreate: by its name, or by the tag of caches."""
    if folder.name == PYCACHE:
        return True
    try:
        with (folder / TAG_FILE).open("rb") as file:
            return file.read(len(TAG)) == TAG
    except OSError:
        return False


def _refuse(error: OSError) -> None:
    reason = f"{error.strerror}{system_remedy(error.errno)}"
    raise ValueError(f"{error.filename}: cannot be read: {reason}.") from error


def _classify(path: Path, found: FolderFiles, text_field: str, follow_links: bool) -> None:
    try:
        status = path.stat()
    except OSError:
        return found.skip("links to nothing")
    if S_ISDIR(status.st_mode):
        return found.skip("links to folders")
    if not S_ISREG(status.st_mode):
        return found.skip("not regular files")
    if path.is_symlink() and not follow_links:
        return found.skip(LINKS, status.st_size)
    if kind_of(path) is None:
        return found.skip(label_of(path), status.st_size)
    if problem := problem_of(path, text_field):
        return found.skip(f"{label_of(path)} {problem}", status.st_size)
    found.read.append(path)
    found.num_bytes += status.st_size
    return None


def _without_text(folder: Path, skipped: Mapping[str, SkippedFiles]) -> str:
    if not skipped:
        return f"{folder}: this folder has no text files. Supported: {SUPPORTED}."
    remedies = _remedies(skipped, without=False)
    end = f" {remedies[0].upper()}{remedies[1:]}." if remedies else ""
    return f"{folder}: this folder has no text files, but {listed(skipped)}. Supported: {SUPPORTED}.{end}"


def _remedies(skipped: Mapping[str, SkippedFiles], *, without: bool = True) -> str:
    """The remedies that apply to these files. without: also offer to continue without them."""
    found = [text for part, text in REMEDIES.items() if part and any(part in label for label in skipped)]
    return ", or ".join([*found, *([REMEDIES[""]] if without else [])])


def _size(num_bytes: int) -> str:
    """Bytes as text: "12.3 MB", or "840 bytes"."""
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 100_000 else f"{num_bytes:,} bytes"
