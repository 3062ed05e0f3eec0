"""Long texts in pieces, so that no text has to fit in memory and one text keeps all cores busy.

Encoders for byte pairs first cut a text into words and spaces. Where a line that ends in something visible is
followed by a letter or a digit, a word ends and another begins for every such encoder in use, so pieces that
are cut there are encoded to the same ids as the whole.
"""

from collections.abc import Iterable, Iterator

PIECE = 1 << 22  # characters


def cut(chunks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Pieces of at most `size` characters of a text that comes in chunks; the same for any chunks."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        while len(rest) > size + 1:  # the character behind a piece decides, too
            end = _last_seam(rest, size)
            yield rest[:end]
            rest = rest[end:]
    while len(rest) > size:
        end = _last_seam(rest, size)
        yield rest[:end]
        rest = rest[end:]
    if rest:
        yield rest


def _last_seam(text: str, size: int) -> int:
    """The last seam in the second half of the first `size` characters; `size` if there is none."""
    seam = text.rfind("\n", size // 2, size)
    while seam > 0:
        if text[seam + 1].isalnum() and not text[seam - 1].isspace():
            return seam + 1
        seam = text.rfind("\n", size // 2, seam)
    return size
