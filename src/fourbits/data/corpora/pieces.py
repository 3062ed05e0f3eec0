"""Long texts in pieces, so that no text has to fit in memory and one text keeps all cores busy.

Encoders for byte pairs first cut a text into words and spaces. Where a line that ends in something visible is
followed by a letter or a digit, a word ends and another begins for every such encoder in use, so pieces that
are cut there are encoded to the same ids as the whole.
"""

from collections.abc import Iterable, Iterator

PIECE = 1 << 18  # characters; an encoder takes some 500 bytes for each, while it works


def cut(chunks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Pieces of at most `size` characters of a text that comes in chunks; the same for any chunks."""
    rest = ""
    for chunk in chunks:
        rest, begin = rest + chunk, 0
        while len(rest) - begin > size:  # so there is a character behind the piece, which decides, too
            end = _last_seam(rest, begin, size)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def _last_seam(text: str, begin: int, size: int) -> int:
    """The last seam in the second half of `size` characters from `begin` on; their end if there is none."""
    first, seam = begin + size // 2, begin + size
    while (seam := text.rfind("\n", first, seam)) >= 0:
        if text[seam + 1].isalnum() and not text[seam - 1].isspace():
            return seam + 1
    return begin + size
