"""Speed of batched generation: prefill, a step, whole texts; compared with transformers' generate.

Both use the same initial weights in BF16, and random tokens as prompts, because the work does not depend on
them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourbits.bench.peers import mamba_ssm
from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    measured,
    medians,
    product_rate,
    release_memory,
)
from fourbits.data.optional import load_transformers
from fourbits.device import peak_flops, probe
from fourbits.exchange.hf import to_hf
from fourbits.generate.cache import empty_cache
from fourbits.generate.decoder import WARMUP, Decoder, ready
from fourbits.generate.forward import read_prompts
from fourbits.generate.generate import generate
from fourbits.generate.sampling import Sampling
from fourbits.model.counts import count_parameters, training_flops
from fourbits.model.lm import LanguageModel
from fourbits.model.presets import MODEL_PRESETS

_PREFILL_GOAL, _SPEED_GOAL = 0.4, 3.0
#: number of timed steps, and of calls of each implementation
_STEPS, _CALLS = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Sizes, by default of hybrid-1.2b on a GPU, and whether transformers is measured."""

    preset: str | None = None
    batch: int | None = None
    prompt: int | None = None
    tokens: int | None = None
    peer: bool = True

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in MODEL_PRESETS:
            raise ValueError(
                f"--preset: must be one of {', '.join(MODEL_PRESETS)}, got {self.preset!r}. Pass one of "
                "these presets."
            )
        for name in ("batch", "prompt", "tokens"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name}: must be at least 1, got {value}. Omit it for its default.")


@dataclass(frozen=True, slots=True)
class _Case:
    """A model and its prompts. name: used in results; prompts: int64 [B, T]."""

    name: str
    model: LanguageModel
    prompts: Tensor
    tokens: int

    @property
    def device(self) -> torch.device:
        return self.prompts.device


def bench_generate(
    device: torch.device, request: GenerateRequest, log: Callable[[str], None] = lambda line: None
) -> Measurements:
    """Measure prefill (model FLOP utilization), a step (of its lower bound), and tokens per second.

    log: receives a line per result. Raises ValueError for sizes beyond the model's max_seq_len.
    """
    rates = copy_bandwidth(device), product_rate(device)
    case = _case(device, request)
    results = [_prefill(case, rates[1]), _step(case, rates[0])]
    own = _calls(case, lambda tokens: _own(case, tokens))
    results.append(_of_texts(f"{case.name}, {case.tokens} tokens", case, own[1], own[1], None))
    if request.peer:
        results += _peer(case, own, log)
    for result in results:
        log(f"{result.name}: {result.seconds * 1e3:,.2f} ms, {result.value:,.3f} {result.unit}")
    return measured("generate", device, tuple(results), rates)


def _case(device: torch.device, request: GenerateRequest) -> _Case:
    on_gpu = device.type == "cuda"
    preset = request.preset or ("hybrid-1.2b" if on_gpu else "tiny")
    batch = request.batch or (64 if on_gpu else 4)
    length, tokens = request.prompt or (512 if on_gpu else 64), request.tokens or (128 if on_gpu else 8)
    config = MODEL_PRESETS[preset]
    if (needed := length + max(tokens, WARMUP + _STEPS + 8)) > config.max_seq_len:
        raise ValueError(
            f"--prompt, --tokens: {preset} reads at most {config.max_seq_len} tokens, these need {needed}."
        )
    model = LanguageModel(config, seed=0).to(device).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        config.vocab_size, (batch, length), generator=generator, dtype=torch.int64, device="cpu"
    )
    return _Case(f"{preset}, {batch} x {length}", model, prompts.to(device), tokens)


def _prefill(case: _Case, gemm_rate: float) -> Result:
    """Time of reading the prompts, with allocation of caches and logits of the last tokens only."""
    rows, length = case.prompts.shape
    lengths = torch.full((rows,), length, dtype=torch.int64, device=case.device)

    def read() -> Tensor:
        return read_prompts(case.model, case.prompts, lengths, empty_cache(case.model, rows, length + 1))

    with ready(case.model):
        (seconds,) = medians([read], case.device, repeats=5)
    release_memory(case.device)
    flops = training_flops(case.model.config, length)
    head = flops.pop("head") / 3  # a forward pass is a third of training
    rate = (sum(flops.values()) / 3 * rows * length + head * rows) / seconds
    peak = peak_flops(probe(case.device), torch.bfloat16)
    return Result(
        name=f"{case.name}, prefill",
        seconds=seconds,
        value=rate / (peak or gemm_rate),
        unit="MFU" if peak else "of the GEMM rate",
        goal=_PREFILL_GOAL if peak else None,
    )


def _step(case: _Case, bandwidth: float) -> Result:
    """Time of one token per sequence, its choice included; on a GPU, from the captured graph."""
    rows, length = case.prompts.shape
    steps = WARMUP + _STEPS + 4
    lengths = torch.full((rows,), length, dtype=torch.int64, device=case.device)
    draws = torch.zeros(rows, dtype=torch.float32, device=case.device)
    with ready(case.model):
        decoder = Decoder(case.model, case.prompts, lengths, length + steps + 1, Sampling())
        (seconds,) = medians([lambda: decoder.next(draws)], case.device, repeats=_STEPS, warm_up=WARMUP + 2)
        least = _moved_bytes(case.model, decoder, length) / bandwidth
    release_memory(case.device)
    return Result(
        name=f"{case.name}, step",
        seconds=seconds,
        value=least / seconds,
        unit="of the ceiling",
        ceiling=1.0,
    )


def _moved_bytes(model: LanguageModel, decoder: Decoder, length: int) -> int:
    """Bytes that a step must move: BF16 weights, states twice, and keys and values of `length` tokens."""
    counts = count_parameters(model.config)
    moved = 2 * (sum(counts.values()) - counts["embedding"])
    moved += sum(2 * 4 * kept.state.numel() for kept in decoder.cache.mamba.values())
    for kept in decoder.cache.attention.values():
        moved += 2 * kept.keys[:, :length].numel() * kept.keys.element_size()
    return moved


def _own(case: _Case, tokens: int) -> list[list[int]]:
    return generate(case.model, case.prompts.tolist(), tokens, batch_size=len(case.prompts))


def _calls(case: _Case, run: Callable[[int], object]) -> tuple[float, float]:
    """Seconds of a call for one token, and for all."""
    one, every = medians([lambda: run(1), lambda: run(case.tokens)], case.device, repeats=_CALLS, warm_up=1)
    release_memory(case.device)
    return one, every


def _of_texts(name: str, case: _Case, seconds: float, own: float, goal: float | None) -> Result:
    """The result of a whole call. own: seconds of our call, if this is another implementation's."""
    rate = len(case.prompts) * case.tokens / seconds
    if seconds is own:
        return Result(name=name, seconds=seconds, value=rate, unit="tokens/s")
    return Result(name=name, seconds=seconds, value=seconds / own, unit="times as long", goal=goal)


def _peer(case: _Case, own: tuple[float, float], log: Callable[[str], None]) -> list[Result]:
    """Measure transformers' generate, with mamba_ssm's kernels if installed."""
    try:
        library = load_transformers("bench generate")
    except ValueError as error:
        log(str(error))
        return []
    absent = mamba_ssm.unsupported() if case.model.config.uses("M") else None
    fast = case.model.config.uses("M") and absent is None and case.device.type == "cuda"
    if absent is not None:
        log(f"{absent}: transformers uses its own PyTorch code")
    with torch.device(case.device):
        theirs = to_hf(case.model, dtype=torch.bfloat16)
    what = f"{case.name}, transformers {library.__version__}{' with mamba_ssm' if fast else ''}"
    with mamba_ssm.mamba_kernels() if fast else nullcontext() as calls, torch.no_grad():
        log(f"first tokens equal to ours: {_agreement(case, theirs)} of {len(case.prompts)}")
        one, every = _calls(case, lambda tokens: _theirs(theirs, case.prompts, tokens))
    log(f"calls of mamba_ssm's kernels: {dict(calls or {})}")
    results = [_of_texts(f"{what}, {case.tokens} tokens", case, every, own[1], _SPEED_GOAL if fast else None)]
    if case.tokens > 1:
        step, own_step = ((each[1] - each[0]) / (case.tokens - 1) for each in ((one, every), own))
        results.append(
            Result(name=f"{what}, step", seconds=step, value=step / own_step, unit="times as long")
        )
    return results


def _theirs(model: Any, prompts: Tensor, tokens: int) -> Tensor:
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )


def _agreement(case: _Case, theirs: Any) -> int:
    """The number of equal first tokens; logits of random weights may differ by less than BF16 resolves."""
    found = _theirs(theirs, case.prompts, 1)[:, -1].tolist()
    return sum(one == first for one, (first,) in zip(found, _own(case, 1), strict=True))
