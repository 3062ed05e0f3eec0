"""Log-likelihoods of continuations, in batches of similar length; each distinct input is read once.

The choices of a question with one token each, such as the letters A to J, share one pass over the question.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.generate.decoder import ready
from fourbits.model.lm import LanguageModel
from fourbits.model.loss import chunk_limit

#: tokens of a batch, padding included
BATCH_TOKENS = 1 << 14

Progress = Callable[[int, int], None]
#: called with (what, done, all)
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens; the last `scored` are the continuation to score."""

    tokens: tuple[int, ...]
    scored: int


@dataclass(frozen=True, slots=True)
class Score:
    """log_likelihood: of the continuation, in nats; greedy: whether each of its tokens is the most likely."""

    log_likelihood: float
    greedy: bool


def score(
    model: LanguageModel,
    passages: Sequence[Passage],
    *,
    num_ids: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    on_progress: Progress | None = None,
) -> list[Score]:
    """The score of each passage, in order; only the last max_seq_len tokens before the last one are read.

    num_ids: probabilities are over the tokens below it, because a vocabulary may be padded beyond its
    tokenizer's. on_progress: called with (inputs read, all inputs). Raises ValueError for a continuation that
    is empty, lacks a token before it, or is longer than max_seq_len.
    """
    rows = _rows(passages, model.config.max_seq_len)
    found: dict[int, Score] = {}
    done = 0
    with ready(model):
        for batch in _batches(sorted(rows, key=lambda row: (-len(row), row)), batch_tokens):
            found |= _scored(model, {row: rows[row] for row in batch}, passages, num_ids)
            done += len(batch)
            if on_progress is not None:
                on_progress(done, len(rows))
    return [found[index] for index in range(len(passages))]


def _rows(passages: Sequence[Passage], limit: int) -> dict[tuple[int, ...], list[int]]:
    """Each distinct input -> the passages with this input."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, passage in enumerate(passages):
        if not 1 <= passage.scored <= min(limit, len(passage.tokens) - 1):
            raise ValueError(
                f"score: a continuation must have at least 1 token and at most max_seq_len = {limit}, and "
                f"follow another token, got {passage.scored} of {len(passage.tokens)} tokens in passage "
                f"{index}. Shorten the continuation, or pass a context before it."
            )
        rows.setdefault(passage.tokens[-limit - 1 : -1], []).append(index)
    return rows


def _batches(rows: Sequence[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Rows, longest first, in groups of at most `tokens` tokens, or of one row."""
    batch: list[tuple[int, ...]] = []
    for row in rows:
        if batch and len(batch[0]) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _scored(
    model: LanguageModel,
    rows: Mapping[tuple[int, ...], list[int]],
    passages: Sequence[Passage],
    num_ids: int | None,
) -> dict[int, Score]:
    """The scores of the passages of one batch, by index."""
    device = model.embed.weight.device
    longest = max(map(len, rows))
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    hidden = model.hidden(torch.tensor(padded, dtype=torch.int64, device=device))
    # (row, position) -> (passage, the token that follows there); positions of several passages are read once
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (row, indexes) in enumerate(rows.items()):
        for index in indexes:
            count = passages[index].scored
            for place, token in enumerate(passages[index].tokens[-count:], len(row) - count):
                by_place.setdefault((number, place), []).append((index, token))
    places = torch.tensor(list(by_place), dtype=torch.int64, device=device)
    queries = list(by_place.values())
    totals: dict[int, float] = {}
    greedy: dict[int, bool] = {}
    step = max(1, chunk_limit(device) // model.config.vocab_size)
    for first in range(0, len(queries), step):
        chunk = places[first : first + step]
        logits = model.head(hidden[chunk[:, 0], chunk[:, 1]])[:, :num_ids].float()
        for index, value, best in _looked_up(logits, queries[first : first + step]):
            totals[index] = totals.get(index, 0.0) + value
            greedy[index] = greedy.get(index, True) and best
    return {index: Score(totals[index], greedy[index]) for index in totals}


def _looked_up(logits: Tensor, queries: Sequence[list[tuple[int, int]]]) -> list[tuple[int, float, bool]]:
    """(passage, log-probability of its token, whether it is the most likely) for the queries of each row."""
    asked = [(row, index, token) for row, query in enumerate(queries) for index, token in query]
    rows, tokens = (
        torch.tensor([query[part] for query in asked], dtype=torch.int64, device=logits.device)
        for part in (0, 2)
    )
    values = logits.log_softmax(-1)[rows, tokens]
    best = logits.argmax(-1)[rows] == tokens
    answers = zip(asked, values.tolist(), best.tolist(), strict=True)
    return [(index, value, most_likely) for (_, index, _), value, most_likely in answers]
