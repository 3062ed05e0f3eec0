"""The records of a step and of a validation, lines of metrics.jsonl, in plain values."""

from collections.abc import Mapping
from typing import Any

import torch

from fourbits.device import Device, peak_flops
from fourbits.evaluate import Loss
from fourbits.model.counts import training_flops
from fourbits.train.config import RunConfig
from fourbits.train.step_result import StepResult


def step_record(
    result: StepResult, tokens_per_step: int, seconds: float, peak: float | None, memory_bytes: int
) -> dict[str, Any]:
    """The record of a step. seconds: its duration; peak: tokens/s at the device's peak, None if unknown."""
    rate = tokens_per_step / seconds
    spike = {} if result.spike_threshold is None else {"spike_threshold": result.spike_threshold}
    return {
        "kind": "train",
        "step": result.step,
        "tokens": result.step * tokens_per_step,
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "skipped": result.skipped,
        "saturated": result.saturated,
        "tokens_per_second": rate,
        "step_seconds": seconds,
        "data_seconds": result.data_seconds,
        "mfu": rate / peak if peak else None,
        "memory_bytes": memory_bytes,
        **spike,
    }


def peak_rate(device: Device, config: RunConfig, ranks: int) -> float | None:
    """Tokens per second at the peak of all ranks' devices, None where it is unknown."""
    peak = peak_flops(device, torch.bfloat16)
    flops = sum(training_flops(config.model, config.train.seq_len).values())
    return ranks * peak / flops if peak else None


def validation_record(step: int, tokens_per_step: int, losses: Mapping[str, Loss]) -> dict[str, Any]:
    """The record of a validation. losses: by source, and over all of them under "loss"."""
    total = losses["loss"]
    record = {
        "kind": "validation",
        "step": step,
        "tokens": step * tokens_per_step,
        "val_loss": total.per_token,
        "val_tokens": total.tokens,
        "val_bits_per_byte": total.bits_per_byte,
    }
    for name, loss in losses.items():
        if name != "loss":
            record |= {f"val_{name}": loss.per_token, f"val_{name}_bits_per_byte": loss.bits_per_byte}
    return record
