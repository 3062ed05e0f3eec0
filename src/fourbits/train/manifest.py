"""manifest.json: a run's settings, software and hardware, in plain values."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from fourbits.data.stream.dataset import PreparedData
from fourbits.device import Device
from fourbits.evaluate import unigram_counts, unigram_entropy
from fourbits.model.counts import count_parameters, training_flops
from fourbits.train.precision import described
from fourbits.train.trainer import Trainer
from fourbits.version import VERSION

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def describe_run(trainer: Trainer, data: PreparedData, device: Device) -> dict[str, Any]:
    """Everything that is needed to judge the run or to repeat it."""
    config = trainer.config
    return {
        "versions": {
            "python": platform.python_version(),
            "fourbits": VERSION,
            **{name: version(name) for name in PACKAGES},
        },
        "device": asdict(device),
        "threads": torch.get_num_threads(),
        "parallel": trainer.ranks.describe(),
        "backend": {"name": trainer.backend.value, "reason": trainer.backend_reason},
        "cuda_graph": {
            "used": trainer.eager_because is None,
            "reason": trainer.eager_because or "train.cuda_graph",
        },
        "recipe": {
            "name": config.recipe.name,
            "digest": config.recipe.digest,
            "source": config.recipe.source,
            "taken": config.recipe.taken,
            "deviates": config.recipe.deviates,
        },
        "precision": trainer.conversion.to_dict(),
        "schedule": described(trainer.recipe),
        "seeds": dict.fromkeys(("weights", "data_order", "random_bits"), config.train.seed),
        "hashes": hashes(trainer, data),
        "model": {
            "parameters": count_parameters(config.model),
            "training_flops_per_token": training_flops(config.model, config.train.seq_len),
        },
        "data": {
            "folder": str(data.folder),
            "tokenizer": data.manifest["tokenizer"],
            "plan": trainer.stream.describe(),
            "unigram_entropy": corpus_entropy(data),
        },
    }


def session_of(trainer: Trainer, device: Device) -> dict[str, Any]:
    """Everything that may change the bits of a run from one process to the next. first_step: its first."""
    return {
        "first_step": trainer.step + 1,
        "torch": version("torch"),
        "device": device.name,
        "threads": torch.get_num_threads(),
        "ranks": trainer.ranks.world,
        "tensor": trainer.ranks.world // trainer.ranks.data_ranks,
        "backend": trainer.backend.value,
        "compile": trainer.config.train.compile,
    }


def session_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A message about what differs between two sessions, or None."""
    parts = [
        f"{name} {now[name]} instead of {before[name]}"
        for name in now
        if name != "first_step" and name in before and before[name] != now[name]
    ]
    if not parts:
        return None
    return (
        f"resumes with {', '.join(parts)}: the result may differ in the last bits from an uninterrupted run"
    )


def hashes(trainer: Trainer, data: PreparedData) -> dict[str, str]:
    """SHA-256 of what every recipe of a comparison must share, taken before the first step.

    initial_weights: the masters; text: token files and tokenizer; data_order: these and the stream's phases;
    validation: the fixed samples.
    """
    order = {"data": data_digest(data), "plan": trainer.stream.describe()}
    weights, validation = trainer.ranks.initial_weights, hashlib.sha256()
    if weights is None:
        whole = hashlib.sha256()
        for name, master in trainer.masters.items():
            whole.update(name.encode() + master.detach().float().cpu().contiguous().numpy().tobytes())
        weights = whole.hexdigest()
    for name, held_out in trainer.held_out.items():
        validation.update(name.encode() + held_out.samples.numpy().tobytes())
    return {
        "initial_weights": weights,
        "text": data_digest(data),
        "data_order": hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest(),
        "validation": validation.hexdigest(),
    }


def data_digest(data: PreparedData) -> str:
    """SHA-256 of the tokenizer and all token files, from their recorded hashes."""
    content = {name: data.manifest[name] for name in ("tokenizer", "sources")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def corpus_entropy(data: PreparedData) -> dict[str, float]:
    """Unigram entropy of the training tokens in nats, per source and of the whole corpus under "corpus"."""
    counts = {
        name: unigram_counts(file.tokens, data.tokenizer.vocab_size) for name, file in data.train.items()
    }
    # Counts of a source come from a sample, so they are scaled to its length.
    lengths = {name: file.num_tokens for name, file in data.train.items()}
    pooled = sum(counts[name] * (lengths[name] / counts[name].sum()) for name in counts)
    return {"corpus": unigram_entropy(pooled), **{name: unigram_entropy(n) for name, n in counts.items()}}
