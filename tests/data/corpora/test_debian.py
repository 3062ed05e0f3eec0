"""The Debian corpus, from small packages: what is read, what is skipped and why, and what is recorded."""

import gzip
import hashlib
import io
import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fourbits.data.config import text_sources
from fourbits.data.corpora.clean_text import skip_reason, split_dictionary, without_markup
from fourbits.data.corpora.corpus_folder import is_corpus
from fourbits.data.corpora.deb_file import files_of
from fourbits.data.corpora.debian import build_debian
from fourbits.data.stream.dataset import DEBIAN_PHASES, default_phases

PROSE = "This is a sentence of the handbook about the system. "
CODE = "static int add(int first, int second)\n{\n\treturn first + second;\n}\n"


def tar(files: dict[str, bytes], mode: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_deb(path: Path, files: dict[str, bytes], compression: str = "xz") -> Path:
    """A package: debian-binary, control.tar.xz and data.tar.xz in an ar archive, as dpkg-deb writes it."""
    data = tar(
        {f"./{name}": raw for name, raw in files.items()}, "w" if compression == "zst" else f"w:{compression}"
    )
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": tar({"./control": b"Package: x\n"}, "w:xz"),
        f"data.tar.{compression}": pa.compress(data, "zstd", asbytes=True) if compression == "zst" else data,
    }
    content = b"!<arch>\n"
    for name, raw in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(raw):<10}`\n".encode()
        content += header + raw + b"\n" * (len(raw) % 2)
    path.write_bytes(content)
    return path


@pytest.fixture
def debs(tmp_path) -> Path:
    folder = tmp_path / "debs"
    folder.mkdir()
    handbook = (
        f"<html><head><title>x</title></head><body><h1>Title</h1><p>{PROSE * 6}</p></body></html>".encode()
    )
    english = "usr/share/doc/debian-handbook/html/en-US"
    write_deb(
        folder / "debian-handbook_11.1_all.deb",
        {
            "usr/share/doc/debian-handbook/copyright": b"Licence: CC-BY-SA-3.0\n",
            f"{english}/one.html": handbook,
            f"{english}/copy.html": handbook.replace(b"This is", b"THIS  is"),
            f"{english}/short.html": b"<p>short</p>",
            f"{english}/image.png": b"png",
            "usr/share/doc/debian-handbook/html/de-DE/one.html": handbook,
            f"{english}/latin.html": "\u00e9".encode("latin-1") * 300,
            f"{english}/russian.html": ("\u0444" * 300).encode(),
            f"{english}/huge.html": b"x" * 1_000_001,
        },
    )
    write_deb(
        folder / "dict-gcide_0.48_all.deb",
        {"usr/share/dictd/gcide.dict.dz": gzip.compress(b"".join(entry(n) for n in range(9000)))},
        "gz",
    )
    write_deb(folder / "git-doc_1%3a2.39-1_all.deb", {"usr/share/doc/git-doc/git.txt": PROSE.encode() * 7})
    kernel = {
        "linux/mm/add.c": (CODE * 4).encode(),
        "linux/asic_reg/table.h": (CODE * 5).encode(),
        "linux/generated.h": b"/* Automatically generated, do not edit */\n" + (CODE * 6).encode(),
    }
    inner = tar(kernel, "w:xz")
    write_deb(folder / "linux-source-6.1_6.1.9_all.deb", {"usr/src/linux-source-6.1.tar.xz": inner})
    write_deb(folder / "linux-source-5.10_5.10_all.deb", {"usr/src/x.c": b"an older kernel" * 50})
    return folder


def entry(number: int) -> bytes:
    return f"Word{number} (w[^o]rd), n.\n   A unit of language, number {number}.\n\n".encode()


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total or total == 0, what


def test_packages_become_three_sources_and_skipped_texts_are_counted_by_reason(debs, tmp_path):
    corpus = build_debian(tmp_path / "out", quiet, debs=debs)
    assert corpus["left_out"] == {"long": 1, "short": 2, "repeated": 1, "not English": 1, "generated": 1}
    books, docs, code = text_sources([str(tmp_path / "out")])
    texts = {source.name: [document.text for document in source.read()] for source in (books, docs, code)}
    assert texts["books"][0].split() == ["Title", *(PROSE * 6).split()]
    assert texts["docs"] == [PROSE * 7]
    assert texts["code"] == [CODE * 4]
    dictionary = texts["books"][1:]
    assert "".join(dictionary).encode() == b"".join(entry(number) for number in range(9000))
    assert len(dictionary) > 3
    assert all(part.startswith("Word") for part in dictionary)


def test_the_manifest_names_version_licence_and_hash_of_every_package(debs, tmp_path):
    build_debian(tmp_path / "out", quiet, debs=debs)
    corpus = json.loads((tmp_path / "out" / "corpus.json").read_text())
    packages = {package["name"]: package for package in corpus["packages"]}
    assert set(packages) == {"debian-handbook", "dict-gcide", "git-doc", "linux-source-6.1"}
    git = packages["git-doc"]
    raw = (debs / "git-doc_1%3a2.39-1_all.deb").read_bytes()
    assert git["sha256"] == hashlib.sha256(raw).hexdigest()
    assert (git["version"], git["licence"], git["source"]) == ("1:2.39-1", "GPL-2.0-only", "docs")
    assert "rust-src" in corpus["missing_packages"]
    assert corpus["sources"]["books"]["licence"] == "(CC-BY-SA-3.0 OR GPL-2.0-or-later) AND GPL-3.0-or-later"
    for record in corpus["sources"].values():
        assert record["documents"] > 0
    assert (tmp_path / "out/licences/debian-handbook.txt").read_text() == "Licence: CC-BY-SA-3.0\n"


def test_equal_packages_give_equal_bytes_and_a_limit_gives_a_prefix(debs, tmp_path):
    one, two = (build_debian(tmp_path / name, quiet, debs=debs) for name in ("one", "two"))
    assert one == two
    short = build_debian(tmp_path / "short", quiet, debs=debs, max_bytes=200_000)
    whole, part = ((tmp_path / name / "books.jsonl").read_bytes() for name in ("one", "short"))
    assert whole.startswith(part)
    assert 100_000 < len(part) < len(whole)
    assert short["sources"]["code"] == one["sources"]["code"]


def test_packages_are_fetched_by_apt_without_root(debs, tmp_path, monkeypatch):
    """With a fake apt that lists names, downloads by copying, and logs its arguments."""
    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()
    names = "git-doc\ndebian-handbook\nlinux-source-5.10\nlinux-source-6.1\n"
    for name, body in {
        "apt-get": f'echo "$@" >> {log}; for last; do :; done; [ $last = update ] || cp {debs}/${{last}}_* .',
        "apt-cache": f"printf '{names}'",
    }.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    corpus = build_debian(tmp_path / "out", quiet)
    assert {package["name"] for package in corpus["packages"]} == {
        "git-doc",
        "debian-handbook",
        "linux-source-6.1",
    }
    calls = log.read_text().splitlines()
    assert calls[0].endswith("update")
    assert sum("download" in call for call in calls) == 3
    assert all(f"Dir::State::Lists={tmp_path / 'out' / 'apt' / 'lists'}" in call for call in calls)


def test_without_apt_the_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs apt-get.*pass their folder with --debs"):
        build_debian(tmp_path / "out", quiet)


def test_an_unreachable_mirror_raises_with_the_message_of_apt(tmp_path, monkeypatch):
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho 'E: Could not resolve host' >&2; exit 100\n")
    (tmp_path / "apt-get").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ValueError, match="apt-get -q update: failed: E: Could not resolve host"):
        build_debian(tmp_path / "out", quiet)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda raw: raw[:-500], "damaged or truncated"), (lambda raw: b"x" + raw, "not a Debian package")],
)
def test_a_damaged_package_raises_and_leaves_no_corpus(debs, tmp_path, damage, message):
    path = debs / "dict-gcide_0.48_all.deb"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"gcide_0\.48_all\.deb: {message}"):
        build_debian(tmp_path / "out", quiet, debs=debs)
    assert not is_corpus(tmp_path / "out")


def test_a_source_without_packages_is_an_error(debs, tmp_path):
    (debs / "git-doc_1%3a2.39-1_all.deb").unlink()
    with pytest.raises(ValueError, match="no package of 'docs' is available"):
        build_debian(tmp_path / "out", quiet, debs=debs)


@pytest.mark.parametrize("compression", ["xz", "gz", "zst"])
def test_packages_are_read_in_every_compression(tmp_path, compression):
    path = write_deb(tmp_path / "x_1_all.deb", {"a.txt": b"one", "b.txt": b"two" * 9999}, compression)
    read = [(name, raw) for name, raw, _ in files_of(path, lambda name, size: True)]
    assert read == [("a.txt", b"one"), ("b.txt", b"two" * 9999)]


def test_only_files_that_the_filter_keeps_are_read(debs):
    seen: list[str] = []

    def keep(name: str, size: int) -> bool:
        seen.append(name)
        return size == 3

    path = debs / "debian-handbook_11.1_all.deb"
    assert [raw for _, raw, _ in files_of(path, keep)] == [b"png"]
    assert len(seen) == 9


def test_markup_is_removed_and_blocks_stay_separate():
    head = "<head><title>t</title></head><script>x < 1</script>"
    page = f"{head}<p>One &amp; <b>two</b></p><pre>a\n b</pre><!-- c -->"
    assert without_markup(page) == "One & two\n\na\n b"


def test_parts_of_a_dictionary_begin_with_an_entry():
    text = "".join(f"w{n}\n   about {n}\n\n" for n in range(20_000))
    parts = list(split_dictionary(text))
    assert "".join(parts) == text
    assert len(parts) > 3
    assert all(part.startswith("w") for part in parts)
    assert skip_reason("x" * 199, is_code=False) == "short"


def test_the_corpus_has_three_phases_that_end_in_prose():
    phases = default_phases(dict.fromkeys(("code", "docs", "books")))  # pyright: ignore[reportArgumentType]
    assert phases == DEBIAN_PHASES
    assert [phase.until for phase in phases] == [0.7, 0.9, 1.0]
    assert all(sum(phase.weights.values()) == pytest.approx(1) for phase in phases)


@pytest.mark.parametrize("size", [b"-60", b"-1", b"", b"1_0", b"0x10", b"nan", b"\xb2"])
def test_a_member_whose_size_is_not_a_number_is_an_error_and_no_loop(tmp_path, size):
    """A negative size would seek back to the member's own header, forever."""
    path = write_deb(tmp_path / "x_1_all.deb", {"usr/a.txt": b"text"})
    raw = bytearray(path.read_bytes())
    raw[8 + 48 : 8 + 58] = size.ljust(10)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x_1_all\.deb: damaged: the header of its member 'debian-binary'"):
        list(files_of(path, lambda name, size: True))


@pytest.mark.parametrize("compression", ["xz", "gz", "zst"])
def test_a_package_damaged_anywhere_is_named_or_read(tmp_path, compression):
    """No byte, inverted, gives another error, a traceback or a loop."""
    whole = write_deb(
        tmp_path / "a_1_all.deb", {f"usr/{n}.txt": PROSE.encode() * 9 for n in range(3)}, compression
    )
    raw, path = whole.read_bytes(), tmp_path / "b_1_all.deb"
    messages = set()
    for place in range(0, len(raw), max(1, len(raw) // 150)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :])
        try:
            list(files_of(path, lambda name, size: True))
        except ValueError as error:
            messages.add(str(error).partition(": ")[0])
    assert messages == {str(path)}


def test_the_limit_counts_bytes_of_text(tmp_path, debs):
    """A letter of more than one byte counts as what it takes; the limit is in MB."""
    written = build_debian(tmp_path / "a", lambda what, done, total: None, debs=debs, max_bytes=200_000)
    for name in written["sources"]:
        records = (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines()
        assert sum(len(json.loads(line)["text"].encode()) for line in records) <= 200_000
