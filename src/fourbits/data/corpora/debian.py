"""The Debian corpus: about 300 million tokens of technical English and code, from packages to a folder.

Packages are fetched and read without root (apt.py, deb_file.py), texts are cleaned (clean_text.py), and those
whose lines equal another's are dropped, across packages. corpus.json records every package with version,
licence and SHA-256, and how many texts were left out for what reason; each package's copyright file is kept
beside it. Versions on a mirror move, so two corpora are equal if their hashes are.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourbits.data.corpora.apt import Apt, newest
from fourbits.data.corpora.clean_text import LONGEST, fault_of, parts_of, text_of
from fourbits.data.corpora.corpus_folder import CORPUS_FILE, write_corpus
from fourbits.data.corpora.deb_file import files_of
from fourbits.data.corpora.debian_packages import CODE, DICTIONARY, PACKAGES, SOURCES, Package, licence_of
from fourbits.data.corpora.deduplicate import Deduplicator
from fourbits.data.corpora.document import Document, Progress, Source
from fourbits.data.whole_file import file_sha256

_DEBS, _LICENCES = "packages", "licences"


@dataclass(slots=True)
class Reading:
    """What is remembered while packages are read."""

    out: Path
    longest_source: int | None
    repeated: Deduplicator = field(default_factory=lambda: Deduplicator("lines"))
    left_out: Counter[str] = field(default_factory=Counter)


def build_debian(
    out: Path | str,
    report: Progress,
    *,
    debs: Path | str | None = None,
    max_bytes: int | None = None,
    packages: Sequence[Package] = PACKAGES,
) -> dict[str, Any]:
    """Write the corpus into the folder `out`. Returns what corpus.json says.

    debs: a folder of packages fetched before, instead of fetching them; max_bytes: text of a source at most.
    Raises ValueError if no package of a source can be had, a package is damaged, or `out` holds a corpus.
    """
    out = Path(out)
    if (out / CORPUS_FILE).exists():
        raise ValueError(f"{out}: holds a corpus already; name another folder.")
    found = _found(Path(debs), packages) if debs else _fetched(out, packages, report)
    missing = [package.name for package in packages if package not in found]
    reading = Reading(out, max_bytes)
    sources = [_source(name, found, reading) for name in SOURCES]
    about: dict[str, Any] = {
        "packages": [_describe(package, path) for package, path in found.items()],
        "missing_packages": missing,
    }
    return write_corpus(sources, out, report=report, about=lambda: {**about, "left_out": reading.left_out})


def _fetched(out: Path, packages: Sequence[Package], report: Progress) -> dict[Package, Path]:
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
        report("packages", done, 0)
    report("packages", done, done)
    return found


def _found(folder: Path, packages: Sequence[Package]) -> dict[Package, Path]:
    files = {path.name.partition("_")[0]: path for path in sorted(folder.glob("*.deb"))}
    return {package: files[name] for package in packages if (name := newest(package.name, list(files)))}


def _describe(package: Package, path: Path) -> dict[str, Any]:
    name, version = path.stem.split("_")[:2]
    record = {"name": name, "version": version.replace("%3a", ":"), "source": package.source}
    return {**record, "licence": package.licence, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _source(name: str, found: dict[Package, Path], reading: Reading) -> Source:
    own = {package: path for package, path in found.items() if package.source == name}
    if not own:
        raise ValueError(
            f"data corpus debian: no package of {name!r} can be had; is deb.debian.org reachable?"
        )
    return Source(
        name,
        tuple(own.values()),
        lambda: _limited(_documents(own, reading), reading),
        licence_of(name, tuple(own)),
    )


def _limited(documents: Iterator[Document], reading: Reading) -> Iterator[Document]:
    left = reading.longest_source
    for document in documents:
        if left is not None:
            left -= len(document.text)
            if left < 0:
                return
        yield document


def _documents(own: dict[Package, Path], reading: Reading) -> Iterator[Document]:
    before = 0
    for package, path in own.items():
        for name, raw, position in files_of(
            path, lambda name, size, p=package: _wanted(p, name, size, reading)
        ):
            if name.endswith("/copyright"):
                _keep_licence(reading.out, path, raw)
                continue
            for document in _texts(package, f"{path.name.partition('_')[0]}/{name}", raw, before + position):
                fault = fault_of(document.text, CODE.search(name) is not None)
                if not fault and reading.repeated.is_repeated(document):
                    fault = "repeated"
                if fault:
                    reading.left_out[fault] += 1
                else:
                    yield document
        before += path.stat().st_size


def _wanted(package: Package, name: str, size: int, reading: Reading) -> bool:
    if name.startswith("usr/share/doc/") and name.endswith("/copyright"):
        return True
    if not package.keep.search(name) or (package.drop and package.drop.search(name)):
        return False
    if size > LONGEST and not DICTIONARY.search(name):
        reading.left_out["long"] += 1
        return False
    return True


def _texts(package: Package, name: str, raw: bytes, position: int) -> Iterator[Document]:
    text = text_of(name, raw)
    if text is None:
        yield Document(name, "", name, position=position)  # counted as short
    elif package.keep is DICTIONARY:
        for number, part in enumerate(parts_of(text)):
            label = f"{name}:{number}"
            yield Document(label, part, label, position=position)
    else:
        yield Document(name, text, name, position=position)


def _keep_licence(out: Path, package: Path, raw: bytes) -> None:
    folder = out / _LICENCES
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{package.name.partition('_')[0]}.txt").write_bytes(raw)
