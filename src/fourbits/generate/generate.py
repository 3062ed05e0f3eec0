"""Continues prompts, in batches of similar length, until each ends or has the requested number of tokens."""

from collections.abc import Callable, Sequence

import torch

from fourbits.generate.decoder import Decoder, ready
from fourbits.generate.sampling import Sampling
from fourbits.model.lm import LanguageModel

#: steps between checks of whether all sequences of a batch have ended, which wait for the device
LOOK_EVERY = 16


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    sampling: Sampling | None = None,
    end: int | None = None,
    num_ids: int | None = None,
    batch_size: int = 64,
    on_token: Callable[[int, int], None] | None = None,
    is_done: Callable[[int, list[int]], bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt by num_tokens tokens, or until `end`, which is not returned; in their order.

    num_ids: only tokens below it are generated, because a model's vocabulary may be padded beyond its
    tokenizer's. Prompts of similar length share a batch, and a sequence's draws do not depend on its batch.
    on_token: called with (index of the prompt, token) for each token as soon as it is known, for streaming.
    is_done: called with (index, its tokens so far) every 16 steps; where it returns True, the sequence ends
    with those tokens, and a batch ends with its last sequence. on_progress: called after each batch with
    (finished prompts, all prompts). Raises ValueError for an empty prompt, a token outside of the vocabulary,
    and a sequence longer than the model's max_seq_len.
    """
    _check(model, prompts, num_tokens, batch_size)
    sampling = sampling or Sampling()
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    found: dict[int, list[int]] = {}
    with ready(model):
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            found |= _continued(model, prompts, batch, num_tokens, sampling, end, num_ids, on_token, is_done)
            if on_progress is not None:
                on_progress(len(found), len(prompts))
    return [found[index] for index in range(len(prompts))]


def _continued(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    batch: list[int],
    num_tokens: int,
    sampling: Sampling,
    end: int | None,
    num_ids: int | None,
    on_token: Callable[[int, int], None] | None,
    is_done: Callable[[int, list[int]], bool] | None,
) -> dict[int, list[int]]:
    """The continuations of one batch, by the index of the prompt."""
    found: dict[int, list[int]] = {index: [] for index in batch}
    if num_tokens == 0:
        return found
    device = model.embed.weight.device
    longest = max(len(prompts[index]) for index in batch)
    rows = [[*prompts[index], *[0] * (longest - len(prompts[index]))] for index in batch]
    lengths = [len(prompts[index]) for index in batch]
    decoder = Decoder(
        model,
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(lengths, dtype=torch.int64, device=device),
        longest + num_tokens,
        sampling,
        num_ids,
    )
    draws = torch.stack([sampling.draws(index, num_tokens) for index in batch], dim=1).to(device)
    look_every = 1 if on_token else LOOK_EVERY
    running, pending = set(batch), []
    for step in range(num_tokens):
        pending.append(decoder.next(draws[step]))
        if len(pending) < look_every and step + 1 < num_tokens:
            continue
        for tokens in torch.stack(pending).tolist():
            for index, token in zip(batch, tokens, strict=True):
                if token == end:
                    running.discard(index)
                elif index in running:
                    found[index].append(token)
                    if on_token is not None:
                        on_token(index, token)
        pending = []
        if is_done is not None:
            running = {index for index in running if not is_done(index, found[index])}
        if not running:
            break
    return found


def _check(model: LanguageModel, prompts: Sequence[Sequence[int]], num_tokens: int, batch_size: int) -> None:
    config = model.config
    if num_tokens < 0 or batch_size < 1:
        raise ValueError(
            f"generate: num_tokens must be at least 0 and batch_size at least 1, got {num_tokens} and "
            f"{batch_size}. Correct them."
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"generate: prompt {index} must have at least one token. Begin it with the end token, which "
                "precedes every document."
            )
        if outside := [token for token in prompt if not 0 <= token < config.vocab_size]:
            raise ValueError(
                f"generate: tokens must be below the model's vocab_size = {config.vocab_size}, got "
                f"{outside[0]} in prompt {index}. Encode prompts with the model's own tokenizer."
            )
        if len(prompt) + num_tokens > config.max_seq_len:
            raise ValueError(
                f"generate: prompt and continuation must have at most max_seq_len = {config.max_seq_len} "
                f"tokens, got {len(prompt)} + {num_tokens} for prompt {index}. Shorten one of them."
            )
