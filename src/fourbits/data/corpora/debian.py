"""The Debian corpus: about 300 million tokens of technical English and code, built from Debian packages.

Packages are downloaded and read without root (apt.py, deb_file.py), texts are cleaned (clean_text.py), and
texts with the same lines as an earlier one, in any package, are dropped. corpus.json records each package's
version, licence and SHA-256, and the number of skipped texts by reason; each package's copyright file is kept
next to it. Mirrors update their versions, so compare two corpora by their hashes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourbits.data.corpora.apt import Apt, newest
from fourbits.data.corpora.clean_text import LONGEST, skip_reason, split_dictionary, text_of
from fourbits.data.corpora.corpus_folder import CORPUS_FILE, write_corpus
from fourbits.data.corpora.deb_file import files_of
from fourbits.data.corpora.debian_packages import CODE, DICTIONARY, PACKAGES, SOURCES, Package, licence_of
from fourbits.data.corpora.deduplicate import Deduplicator
from fourbits.data.corpora.document import Document, Progress, Source
from fourbits.data.whole_file import file_sha256

_DEBS, _LICENCES = "packages", "licences"


@dataclass(slots=True)
class BuildState:
    """State shared by all packages of a build. max_bytes: limit per source, None for no limit."""

    out: Path
    max_bytes: int | None
    deduplicator: Deduplicator = field(default_factory=lambda: Deduplicator("lines"))
    skipped: Counter[str] = field(default_factory=Counter)


def build_debian(
    out: Path | str,
    progress: Progress,
    *,
    debs: Path | str | None = None,
    max_bytes: int | None = None,
    packages: Sequence[Package] = PACKAGES,
) -> dict[str, Any]:
    """Write the corpus into the folder `out`. Returns the content of corpus.json.

    debs: a folder of downloaded packages, to use instead of apt-get; max_bytes: limit on each source's text.
    Raises ValueError if a source has no available package, a package is damaged, or `out` holds a corpus.
    """
    out = Path(out)
    if (out / CORPUS_FILE).exists():
        raise ValueError(f"{out}: already holds a corpus; choose another folder.")
    found = _local_packages(Path(debs), packages) if debs else _download(out, packages, progress)
    missing = [package.name for package in packages if package not in found]
    state = BuildState(out, max_bytes)
    sources = [_source(name, found, state) for name in SOURCES]
    extra: dict[str, Any] = {
        "packages": [_describe(package, path) for package, path in found.items()],
        "missing_packages": missing,
    }
    return write_corpus(sources, out, progress=progress, extra=lambda: {**extra, "left_out": state.skipped})


def _download(out: Path, packages: Sequence[Package], progress: Progress) -> dict[Package, Path]:
    apt, into = Apt(out / "apt"), out / _DEBS
    into.mkdir(parents=True, exist_ok=True)
    apt.update()
    names = apt.names()
    available = {package: name for package in packages if (name := newest(package.name, names))}
    found: dict[Package, Path] = {}
    done = 0
    for package, name in available.items():
        found[package] = apt.download(name, into)
        done += found[package].stat().st_size
        progress("packages", done, 0)
    progress("packages", done, done)
    return found


def _local_packages(folder: Path, packages: Sequence[Package]) -> dict[Package, Path]:
    files = {path.name.partition("_")[0]: path for path in sorted(folder.glob("*.deb"))}
    return {package: files[name] for package in packages if (name := newest(package.name, list(files)))}


def _describe(package: Package, path: Path) -> dict[str, Any]:
    name, version = path.stem.split("_")[:2]
    record = {"name": name, "version": version.replace("%3a", ":"), "source": package.source}
    return {**record, "licence": package.licence, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _source(name: str, found: dict[Package, Path], state: BuildState) -> Source:
    own = {package: path for package, path in found.items() if package.source == name}
    if not own:
        raise ValueError(f"no package of {name!r} is available. Check the apt sources and the network.")
    return Source(
        name,
        tuple(own.values()),
        lambda: _limited(_documents(own, state), state.max_bytes),
        licence_of(name, tuple(own)),
    )


def _limited(documents: Iterator[Document], left: int | None) -> Iterator[Document]:
    for document in documents:
        if left is not None:
            left -= len(document.text.encode())
            if left < 0:
                return
        yield document


def _documents(own: dict[Package, Path], state: BuildState) -> Iterator[Document]:
    before = 0
    for package, path in own.items():
        for name, raw, position in files_of(
            path, lambda name, size, p=package: _is_kept(p, name, size, state)
        ):
            if name.endswith("/copyright"):
                _write_copyright(state.out, path, raw)
                continue
            for document in _texts(package, f"{path.name.partition('_')[0]}/{name}", raw, before + position):
                reason = skip_reason(document.text, CODE.search(name) is not None)
                if not reason and state.deduplicator.is_duplicate(document):
                    reason = "repeated"
                if reason:
                    state.skipped[reason] += 1
                else:
                    yield document
        before += path.stat().st_size


def _is_kept(package: Package, name: str, size: int, state: BuildState) -> bool:
    if name.startswith("usr/share/doc/") and name.endswith("/copyright"):
        return True
    if not package.keep.search(name) or (package.drop and package.drop.search(name)):
        return False
    if size > LONGEST and not DICTIONARY.search(name):
        state.skipped["long"] += 1
        return False
    return True


def _texts(package: Package, name: str, raw: bytes, position: int) -> Iterator[Document]:
    text = text_of(name, raw)
    if text is None:
        yield Document(name, "", name, position=position)  # counted as short
    elif package.keep is DICTIONARY:
        for number, part in enumerate(split_dictionary(text)):
            label = f"{name}:{number}"
            yield Document(label, part, label, position=position)
    else:
        yield Document(name, text, name, position=position)


def _write_copyright(out: Path, package: Path, raw: bytes) -> None:
    folder = out / _LICENCES
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{package.name.partition('_')[0]}.txt").write_bytes(raw)
