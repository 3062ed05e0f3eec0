"""Splits long texts into pieces, so that no text has to fit in memory and one text keeps all cores busy.

BPE encoders first split a text into words and spaces. Every such encoder in use splits between a line break
after a visible character and a letter or digit, so pieces that are split there encode to the same tokens as
the whole text.
"""

from collections.abc import Iterable, Iterator

PIECE = 1 << 18  # characters; an encoder needs about 500 bytes of memory for each


def split_text(chunks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Split a text into pieces of at most `size` characters, independently of the chunks it arrives in."""
    rest = ""
    for chunk in chunks:
        rest, begin = rest + chunk, 0
        while len(rest) - begin > size:  # whether to split also depends on the character after the piece
            end = _last_split_point(rest, begin, size)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def _last_split_point(text: str, begin: int, size: int) -> int:
    """The last split point in the second half of the `size` characters from `begin` on, else their end."""
    first, newline = begin + size // 2, begin + size
    while (newline := text.rfind("\n", first, newline)) >= 0:
        if text[newline + 1].isalnum() and not text[newline - 1].isspace():
            return newline + 1
    return begin + size
