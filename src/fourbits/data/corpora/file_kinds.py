"""The kinds of files that are read, by name; letters may have either case, and .gz or .zst may follow.

.json is the name of JSON lines, of arrays and of settings; it is read if its first line is a JSON object with
the text field. A .csv is read if it has the text column.
"""

from pathlib import Path
from typing import Literal

Kind = Literal["text", "json lines", "json", "csv", "parquet"]

PLAIN = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html", ".htm")
CODE = (
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".go", ".rs", ".java", ".kt", ".scala"),
    *(".py", ".pyi", ".rb", ".php", ".pl", ".lua", ".sh", ".sql", ".r", ".jl", ".hs", ".ml", ".swift"),
    *(".js", ".jsx", ".ts", ".tsx", ".cs", ".s", ".asm", ".f90", ".proto", ".cmake", ".zig"),
)
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(PLAIN + CODE, "text"),
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")
SUPPORTED = (
    ".txt, .md, source code, .jsonl, .ndjson, .json with an object per line, .csv (each also as .gz or "
    ".zst), .parquet, or the .idx of a token file"
)


def kind_of(path: Path) -> Kind | None:
    """How a file is read, by its name; None if it is not."""
    inner, compression = _suffixes(path)
    kind = _KINDS.get(inner)
    return None if kind == "parquet" and compression else kind


def compression_of(path: Path) -> str:
    """ ".gz", ".zst" or ""."""
    return _suffixes(path)[1]


def label_of(path: Path) -> str:
    """The extension as reports show it, such as ".png" or ".tar.gz"."""
    return "".join(_suffixes(path)) or "without extension"


def stem_of(path: Path) -> str:
    """The name without its suffix, and without .gz or .zst after that."""
    return Path(path.stem).stem if compression_of(path) else path.stem


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix, without that of a compression, and the compression's, in small letters."""
    last = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), last) if last in COMPRESSIONS else (last, "")
