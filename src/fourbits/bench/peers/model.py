"""The training step of Hugging Face's implementation at the same shapes, and of a plain PyTorch model.

All have FP32 parameters under autocast to BF16, compute the loss over every token, clip, and update with
fused AdamW, on the same number of random tokens. Our residual stream is BF16; in transformers autocast leaves
it in FP32. If a peer is not installed or does not fit in the GPU's memory, its result gives the reason.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.bench.peers import mamba_ssm
from fourbits.bench.peers.mamba_ssm import mamba_kernels
from fourbits.bench.peers.plain_transformer import PlainTransformer
from fourbits.bench.timing import medians, release_memory
from fourbits.data.optional import load_transformers
from fourbits.exchange.config import to_hf_config
from fourbits.model.config import ModelConfig
from fourbits.train.config import RunConfig


@dataclass(frozen=True, slots=True)
class _Kind:
    """maker: whose model; compiled: with torch.compile; kernels: with mamba_ssm's kernels."""

    maker: str
    compiled: bool
    kernels: bool = False
    #: target: our tokens/s over theirs
    goal: float | None = None


PEERS = {
    "transformers": _Kind("transformers", compiled=False, goal=1.5),
    "transformers-compiled": _Kind("transformers", compiled=True, goal=1.0),
    "transformers-mamba-ssm": _Kind("transformers", compiled=False, kernels=True, goal=1.2),
    "plain-compiled": _Kind("plain", compiled=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRun:
    """One peer's steps, or why it has none. kernel_calls: calls of mamba_ssm's scan in all steps."""

    name: str
    what: str
    goal: float | None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak: int | None = None
    kernel_calls: int | None = None
    absent: str | None = None


def bench_peer(name: str, config: RunConfig, device: torch.device, repeats: int) -> PeerRun:
    """Time a peer's steps at the run's sizes."""
    kind = PEERS[name]
    if absent := _unsupported(kind, config.model):
        return PeerRun(name=name, what=kind.maker, goal=kind.goal, absent=absent)
    release_memory(device)
    try:
        with ExitStack() as stack:
            calls = stack.enter_context(mamba_kernels()) if kind.kernels else None
            model, what = _build(kind, config.model, device)
            (seconds,) = medians([_step(kind, model, config, device)], device, repeats)
    except torch.OutOfMemoryError as error:
        return PeerRun(name=name, what=kind.maker, goal=kind.goal, absent=f"out of memory: {error}")
    return PeerRun(
        name=name,
        what=what,
        goal=kind.goal,
        seconds=seconds,
        tokens_per_second=config.train.tokens_per_step / seconds,
        peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        kernel_calls=None if calls is None else calls["mamba_chunk_scan_combined"],
    )


def _unsupported(kind: _Kind, model: ModelConfig) -> str | None:
    more = model.qk_norm or model.rope_scaling or model.sliding_window
    if kind.maker == "plain" and (set(model.pattern) != {"T"} or model.activation != "relu2" or more):
        return "the plain model is a Transformer with squared ReLU, and plain attention"
    if kind.kernels and not model.uses("M"):
        return "the model has no Mamba layers"
    if kind.kernels and (reason := mamba_ssm.unsupported()):
        return reason
    if kind.maker == "transformers":
        try:
            load_transformers("the benchmark")
        except ValueError as error:
            return str(error)
    return None


def _build(kind: _Kind, model: ModelConfig, device: torch.device) -> tuple[nn.Module, str]:
    """An FP32 model with random weights, in training mode, and its description."""
    with torch.device(device):
        if kind.maker == "plain":
            return PlainTransformer(model), "plain PyTorch, about 80 lines"
        transformers = load_transformers("the benchmark")
        described = to_hf_config(model, torch.float32)
        family = described.pop("model_type")
        config = transformers.AutoConfig.for_model(family, **described)
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    return theirs, f"{type(theirs).__name__} of transformers {transformers.__version__}"


def _step(kind: _Kind, model: nn.Module, config: RunConfig, device: torch.device) -> Callable[[], object]:
    train = config.train
    shape = (train.micro_batch_size, train.seq_len + 1)
    samples = torch.randint(config.model.vocab_size, shape, device=device, dtype=torch.int64)
    tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    run: Any = torch.compile(model, dynamic=False) if kind.compiled else model

    def loss_of() -> Tensor:
        if kind.maker == "plain":
            return run(tokens, targets)
        return run(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    def step() -> None:
        for _ in range(train.gradient_accumulation):
            with torch.autocast(device.type, torch.bfloat16), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss = loss_of()
            (loss / train.gradient_accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
