"""A model with its tokenizer, for texts: scores continuations, and continues texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from fourbits.data.tokenizer import Tokenizer
from fourbits.generate.generate import LOOK_EVERY, generate
from fourbits.generate.sampling import Sampling
from fourbits.harness.scoring import BATCH_TOKENS, Passage, Progress, Score, score
from fourbits.model.lm import LanguageModel


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model and its tokenizer.

    prefix: the tokens before every text, because documents follow an end token in training. batch_size:
    sequences in a batch of generation; batch_tokens: tokens in a batch of scoring.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    batch_size: int = 64
    batch_tokens: int = BATCH_TOKENS

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model reads."""
        return self.model.config.max_seq_len

    def scores(self, passages: Sequence[Passage], on_progress: Progress | None = None) -> list[Score]:
        """The score of each passage, see `score`."""
        return score(
            self.model,
            passages,
            num_ids=self.tokenizer.size,
            batch_tokens=self.batch_tokens,
            on_progress=on_progress,
        )

    def continued(
        self,
        texts: Sequence[str],
        num_tokens: int,
        stops: Sequence[Sequence[str]],
        sampling: Sampling,
        on_progress: Progress | None = None,
    ) -> tuple[list[str], int]:
        """The continuation of each text, up to its end token, to the first of its `stops` or to num_tokens.

        Also returns the number of texts that lost their beginning, because with num_tokens they exceed
        max_seq_len; num_tokens itself is limited to half of that.
        """
        num_tokens = min(num_tokens, self.max_seq_len // 2)
        room = self.max_seq_len - num_tokens
        prompts = [[*self.prefix, *self.tokenizer.encode(text)] for text in texts]
        truncated = sum(len(prompt) > room for prompt in prompts)
        # a stop is searched in the tokens since the last search, and in those that may hold its beginning
        longest = [max((len(stop.encode()) for stop in row), default=0) for row in stops]

        def is_done(index: int, tokens: list[int]) -> bool:
            tail = self.tokenizer.decode(tokens[-(LOOK_EVERY + longest[index]) :])
            return any(stop in tail for stop in stops[index])

        found = generate(
            self.model,
            [prompt[-room:] for prompt in prompts],
            num_tokens,
            sampling=sampling,
            end=self.tokenizer.end_id,
            num_ids=self.tokenizer.size,
            batch_size=self.batch_size,
            is_done=is_done,
            on_progress=on_progress,
        )
        decoded = (self.tokenizer.decode(tokens) for tokens in found)
        return [until(text, row) for text, row in zip(decoded, stops, strict=True)], truncated


def until(text: str, stops: Sequence[str]) -> str:
    """The text up to the first occurrence of any of the stops."""
    for stop in stops:
        if stop:
            text = text.partition(stop)[0]
    return text
