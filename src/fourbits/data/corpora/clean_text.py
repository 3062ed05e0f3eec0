"""Turns a package's file into training text: strips markup, splits dictionaries, rejects junk."""

import gzip
import html
import re
from collections.abc import Iterator

LONGEST = 1_000_000  # bytes per file; longer ones are tables and generated code
SHORTEST = 200  # characters
_PART = 64 << 10  # characters per part of a dictionary
_ASCII_SHARE = 0.9

_INVISIBLE = re.compile(r"<(script|style|nav|head)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I)
_BLOCK = re.compile(r"</?(p|div|h\d|li|ul|ol|dl|dt|dd|tr|table|pre|br|hr|section|blockquote)\b[^>]*>", re.I)
_TAG = re.compile(r"<[^<>]*>")
_SPACES = re.compile(r"[ \t\r\f\v]+")
_EMPTY_LINES = re.compile(r"\n\s*\n\s*")
_GENERATED = re.compile(r"auto(matically)?[- ]?generated|generated automatically|do not (edit|modify)", re.I)


def text_of(name: str, raw: bytes) -> str | None:
    """The text of a file, decoded by its suffix; None if it is not UTF-8 or its compression is damaged."""
    try:
        if name.endswith((".gz", ".dz")):
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8")
    except (UnicodeDecodeError, OSError, EOFError):
        return None
    return without_markup(text) if name.endswith((".html", ".htm")) else text


def without_markup(text: str) -> str:
    """HTML as plain text: each block on its own line, entities decoded, line breaks in <pre> kept."""
    text = _BLOCK.sub("\n", _INVISIBLE.sub("", text))
    text = html.unescape(_TAG.sub("", text)).replace("\xa0", " ")
    return _EMPTY_LINES.sub("\n\n", _SPACES.sub(" ", text)).strip()


def skip_reason(text: str, is_code: bool) -> str | None:
    """Why a text is skipped, in a few words; None if it is kept."""
    if len(text) < SHORTEST:
        return "short"
    if is_code and _GENERATED.search(text, 0, 2000):
        return "generated"
    if len(text.encode("ascii", "ignore")) < _ASCII_SHARE * len(text):
        return "not English"
    return None


def split_dictionary(text: str) -> Iterator[str]:
    """A dictionary in parts of about 64 Ki characters, split at lines that begin an entry (not indented)."""
    begin = 0
    while len(text) - begin > 2 * _PART:
        end = text.find("\n", begin + _PART)
        while end >= 0 and text[end + 1 : end + 2].isspace():
            end = text.find("\n", end + 1)
        if end < 0:
            break
        yield text[begin : end + 1]
        begin = end + 1
    yield text[begin:]
