"""The packages of the Debian corpus, all from Debian's main section, by kind of text.

Three sources for three phases: code, technical documentation, and books and dictionaries, which have the best
prose. All of it may be copied under the licences below, most of which set conditions on redistribution.
"""

from dataclasses import dataclass
from re import Pattern, compile

CODE = compile(r"\.(c|h|S|s|go|rs|py|sh)$")
HTML, SPHINX, DICTIONARY = compile(r"\.html$"), compile(r"/_sources/.*\.txt$"), compile(r"\.dict\.dz$")


@dataclass(frozen=True, slots=True)
class Package:
    """name: a regular expression, of which the newest match is used; keep, drop: which files to read."""

    name: str
    source: str
    keep: Pattern[str]
    licence: str
    drop: Pattern[str] | None = None


# In order of precedence: of two equal texts the first is kept.
PACKAGES = (
    Package("debian-handbook", "books", compile(r"/en-US/.*\.html$"), "CC-BY-SA-3.0 OR GPL-2.0-or-later"),
    Package("debian-reference-en", "books", HTML, "GPL-2.0-or-later"),
    Package("anarchism", "books", compile(r"\.md\.gz$"), "GFDL-1.1-or-later OR GPL-2.0-or-later"),
    Package("dict-gcide", "books", DICTIONARY, "GPL-3.0-or-later"),
    Package("dict-wn", "books", DICTIONARY, "WordNet-3.0"),
    Package("dict-jargon", "books", DICTIONARY, "public domain"),
    Package(r"linux-doc-[\d.]+", "docs", SPHINX, "GPL-2.0-only"),
    Package(r"python3\.\d+-doc", "docs", SPHINX, "PSF-2.0"),
    Package("debian-policy", "docs", SPHINX, "GPL-2.0-or-later"),
    Package("developers-reference", "docs", SPHINX, "GPL-2.0-or-later"),
    Package("python-sklearn-doc", "docs", SPHINX, "BSD-3-Clause"),
    Package("git-doc", "docs", compile(r"\.txt$"), "GPL-2.0-only"),
    Package("perl-doc", "docs", compile(r"\.pod$"), "Artistic-1.0-Perl OR GPL-1.0-or-later"),
    Package("installation-guide-amd64", "docs", compile(r"/en/.*\.txt\.gz$"), "GPL-2.0-or-later"),
    Package("sqlite3-doc", "docs", HTML, "blessing"),
    Package("python-django-doc", "docs", HTML, "BSD-3-Clause"),
    Package(r"postgresql-doc-\d+", "docs", HTML, "PostgreSQL"),
    Package("vim-doc", "docs", HTML, "Vim"),
    Package("libreoffice-help-en-us", "docs", compile(r"/text/.*\.html$"), "MPL-2.0"),
    Package(
        r"openjdk-\d+-doc",
        "docs",
        HTML,
        "GPL-2.0-only WITH Classpath-exception-2.0",
        drop=compile(r"/(class-use|index-files)/|-(tree|use|summary)\.html$|/all[a-z-]*index"),
    ),
    Package(r"linux-source-[\d.]+", "code", CODE, "GPL-2.0-only", drop=compile(r"/asic_reg/|/vega10_ip")),
    Package(r"golang-[\d.]+-src", "code", CODE, "BSD-3-Clause"),
    Package("rust-src", "code", CODE, "MIT OR Apache-2.0"),
    Package("glibc-source", "code", CODE, "LGPL-2.1-or-later"),
)
SOURCES = tuple(dict.fromkeys(package.source for package in PACKAGES))


def licence_of(source: str, packages: tuple[Package, ...]) -> str:
    """The licences of a source's packages as one SPDX expression."""
    own = sorted({package.licence for package in packages if package.source == source})
    return " AND ".join(f"({name})" if " OR " in name else name for name in own)
