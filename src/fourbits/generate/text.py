"""Converts tokens to text while they arrive."""

from fourbits.data.tokenizer import Tokenizer


class TextStream:
    """The text of a growing sequence of tokens, piece by piece.

    A character may take several tokens, so a piece ends before an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._tokens, self._shown = tokenizer, list[int](), 0

    def add(self, token: int) -> str:
        """The text that a token completes, possibly empty."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._new(text)

    def rest(self) -> str:
        """The rest of the text at the end, incomplete characters included."""
        return self._new(self._tokenizer.decode(self._tokens))

    def _new(self, text: str) -> str:
        piece, self._shown = text[self._shown :], len(text)
        return piece
