"""Fabricated run folders for tests: the files of a run, with curves from a formula. Nothing was trained."""

import json
from pathlib import Path

import numpy as np

from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.runs import Run
from fourbits.compare.run.provenance import Provenance
from fourbits.settings import dump_yaml

STEPS, TOKENS_PER_STEP, EVALUATE_EVERY = 256, 2048, 16
# How every fabricated run executed, unless a test says otherwise.
SAME_LOAD = Provenance(session="one", jobs=2, threads=1, together=STEPS)
# recipe -> (final gap to bf16 in nats, tokens/s, MiB, format of quantized layers)
RECIPES = {
    "bf16": (0.0, 12000, 900, "bf16"),
    "fp8": (0.004, 9000, 940, "fp8"),
    "mxfp4": (0.061, 7000, 960, "mxfp4"),
    "nvfp4": (0.038, 6500, 955, "nvfp4"),
    "nvfp4-naive": (0.092, 6900, 950, "nvfp4"),
}
KEPT = {"nvfp4": (0, 9), "mxfp4": (0, 9), "fp8": (9,)}
PATTERN = "M-M-M*-M-"


def fabricate_run(
    path: Path, recipe: str, seed: int = 0, steps: int = STEPS, non_finite_at: int | None = None
) -> Run:
    """Write a complete run folder and read it back. non_finite_at: the step whose loss was not finite."""
    path.mkdir(parents=True)
    records = fabricated_records(recipe, seed, steps)
    if non_finite_at is not None:
        records = [record for record in records if record["step"] < non_finite_at]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "config.yaml").write_text(dump_yaml({"model": {"pattern": PATTERN, "d_model": 128}}))
    (path / "manifest.json").write_text(json.dumps(fabricated_manifest(recipe, seed, steps)))
    summary = {
        "ended": "finished" if non_finite_at is None else "non-finite",
        "reason": None
        if non_finite_at is None
        else f"step {non_finite_at}: the loss is nan. The update was skipped.",
        "train_loss": records[-1].get("loss", 3.5),
        "seconds": steps * TOKENS_PER_STEP / RECIPES[recipe][1],
        "peak_memory_bytes": RECIPES[recipe][2] * 2**20,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return Run.read(path)


def fabricated_records(recipe: str, seed: int, steps: int) -> list[dict]:
    gap, speed, _, _ = RECIPES[recipe]
    batches = np.random.default_rng(seed)
    own = np.random.default_rng([seed, len(recipe)])
    records: list[dict] = []
    for step in range(1, steps + 1):
        done = step / steps
        clean = 3.4 + 4.2 * np.exp(-9 * done) + 0.5 * np.exp(-2 * done) + gap * (1 - np.exp(-6 * done))
        shift = -0.25 * (done <= 0.7) + 0.2 * (done > 0.9)
        loss = clean + shift + 0.08 * batches.standard_normal() + 0.004 * own.standard_normal()
        records.append(
            {
                "kind": "train",
                "step": step,
                "loss": loss,
                "lr": 3e-3 * min(1, 20 * done) * min(1, 5 * (1.002 - done)),
                "grad_norm": 0.6 + 0.4 * np.exp(-8 * done) + 0.05 * own.standard_normal(),
                "tokens": step * TOKENS_PER_STEP,
                "tokens_per_second": speed * (0.1 if step == 1 else 1 + 0.03 * own.standard_normal()),
                "step_seconds": TOKENS_PER_STEP / speed,
                "mfu": None,
                "memory_bytes": RECIPES[recipe][2] * 2**20,
            }
        )
        if step % EVALUATE_EVERY == 0:
            noisy = clean + 0.003 * own.standard_normal()
            sources = {"val_code": noisy - 0.3, "val_prose": noisy + 0.3 + gap}
            records.append(
                {"kind": "validation", "step": step, "val_loss": noisy, "val_tokens": 65536}
                | sources
                | {f"{name}_bits_per_byte": 1.0 for name in sources}
            )
    return records


def fabricated_manifest(recipe: str, seed: int, steps: int) -> dict:
    return {
        "recipe": {"name": recipe, "digest": f"{len(recipe):016x}"},
        "precision": fabricated_precision(recipe),
        "hashes": {"initial_weights": f"w{seed}", "data_order": f"d{seed}", "validation": "v"},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "fourbits": "0.1.0"},
        "device": {"name": "x86_64 CPU (AVX512)"},
        "threads": 2,
        "backend": {
            "name": "emulated",
            "reason": "the compiled reference and dequantized operands on the CPU",
        },
        "model": {"parameters": {"embedding": 262_144, "head": 262_144, "linear": 990_000}},
        "data": {
            "unigram_entropy": {"corpus": 6.02, "code": 5.912, "prose": 6.213},
            "plan": {
                "seq_len": 256,
                "phases": [{"first_sample": int(steps * 8 * share)} for share in (0, 0.7, 0.9)],
                "sources": {"code": {"epochs": 0.4}, "prose": {"epochs": 1.0}},
            },
        },
    }


def fabricated_precision(recipe: str) -> dict:
    form = RECIPES[recipe][3]
    linears = []
    for block, letter in enumerate(PATTERN):
        for name, shape in LINEARS[letter]:
            kept = block in KEPT.get(recipe, ()) or form == "bf16"
            reason = (
                f"recipe {recipe}"
                if form == "bf16" or not kept
                else f"first 1 or last 1 of {len(PATTERN)} blocks"
            )
            full = f"blocks.{block}.mixer.{name}"
            linears.append(
                {"name": full, "shape": shape, "precision": "bf16" if kept else form, "reason": reason}
            )
    linears.append(
        {"name": "head", "shape": [2048, 128], "precision": "bf16", "reason": "output head or embedding"}
    )
    share = sum(row["precision"] != "bf16" for row in linears) / len(linears)
    shares = dict.fromkeys(("share_of_linears", "share_of_parameters", "share_of_flops"), share)
    return {"recipe": recipe, **shares, "linears": linears}


LINEARS = {
    "M": [("in_proj", [592, 128]), ("out_proj", [128, 256])],
    "-": [("up", [512, 128]), ("down", [128, 512])],
    "*": [("q_proj", [128, 128]), ("k_proj", [64, 128]), ("v_proj", [64, 128]), ("o_proj", [128, 128])],
}


def fabricate_comparison(root: Path, recipes: list[str], seeds: list[int], steps: int = STEPS) -> Comparison:
    """Every recipe with every seed, all executed in one session."""
    runs = {
        recipe: {seed: fabricate_run(root / recipe / f"seed{seed}", recipe, seed, steps) for seed in seeds}
        for recipe in recipes
    }
    provenance = {(recipe, seed): SAME_LOAD for recipe in recipes for seed in seeds}
    return Comparison("fabricated", recipes[0], runs, provenance)
