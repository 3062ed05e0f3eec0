"""Counts the characters that a tokenizer loses: those of a text that its decoded tokens do not contain.

A vocabulary without bytes and without the letters of a text encodes it to fewer tokens, or to none, without
an error. A sample of windows is encoded and decoded again: up to 1,024 characters of the first 256 documents
and of every 32nd after them. The sample depends on the documents' numbers alone, so that a resumed
preparation counts what an uninterrupted one does.
"""

from collections import Counter
from dataclasses import dataclass, field

from fourbits.data.corpora.document import Document
from fourbits.data.prepare.progress_file import Tally
from fourbits.data.tokenizer import Tokenizer

MAX_LOST = 0.01
_WINDOW = 1024
_FIRST_DOCUMENTS, _EVERY = 256, 32
# A tokenizer that loses this many times the limit is refused before the source is read to its end.
_EARLY, _EARLY_SAMPLE = 10, 10_000
_STRIDE = 2_654_435_761  # odd and large, so that windows of consecutive documents lie at unrelated offsets


@dataclass(slots=True)
class RoundTrip:
    """The check of one source. max_lost: the largest share of the sampled characters that may be lost."""

    tokenizer: Tokenizer
    max_lost: float
    lost: Counter[str] = field(default_factory=Counter[str])

    def sample(self, document: Document, number: int, tally: Tally) -> None:
        """Check a document, or a piece of one, if it belongs to the sample. number: in the source, from 1."""
        if document.tokens is not None or (number > _FIRST_DOCUMENTS and number % _EVERY):
            return
        begin = number * _STRIDE % max(1, len(document.text) - _WINDOW + 1)
        window = document.text[begin : begin + _WINDOW]
        missing = Counter(window) - Counter(self.tokenizer.decode(self.tokenizer.encode(window)))
        tally.sampled_characters += len(window)
        tally.lost_characters += missing.total()
        self.lost += missing

    def check(self, name: str, tally: Tally, *, at_end: bool) -> None:
        """Raises ValueError if the tokenizer loses too many of the source's characters."""
        sampled, lost = tally.sampled_characters, tally.lost_characters
        limit = self.max_lost if at_end else min(_EARLY * self.max_lost, 1.0)
        if not lost or lost <= limit * sampled or (sampled < _EARLY_SAMPLE and not at_end):
            return
        most = ", ".join(repr(character) for character, _ in self.lost.most_common(5))
        raise ValueError(
            f"the tokenizer loses {lost / sampled:.1%} of the characters of {name!r}: {lost:,} of "
            f"{sampled:,} sampled, most often {most}; at most {self.max_lost:.1%} may be lost. Choose a "
            f"tokenizer whose vocabulary covers this text, or raise --max-lost (data.max_lost)."
        )
