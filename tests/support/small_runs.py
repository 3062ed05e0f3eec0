"""Runs that take a second: a Llama or hybrid of a few blocks, two steps on one sentence."""

from pathlib import Path

from fourbits.cli.main import main

RUN = """
model: {{vocab_size: 384, d_model: {width}, pattern: "{pattern}", d_ffn: 32, num_heads: 1, num_kv_heads: 1,
  head_dim: 16, {family}}}
recipe: {recipe}
data: {{vocab_size: 384, paths: ["{text}"]}}
train: {{steps: 2, micro_batch_size: 2, seq_len: 16, validation_samples: 2, compile: none, threads: 1,
  device: cpu}}
"""
LLAMA = "activation: swiglu, rope_theta: 10000.0"
HYBRID = "mamba_num_heads: 4, mamba_head_dim: 8, state_size: 16, num_groups: 1, chunk_size: 16"


def trained(
    folder: Path, recipe: str = "nvfp4", pattern: str = "TT", width: int = 16, family: str = LLAMA
) -> Path:
    """The folder of a run. recipe: a name, or a recipe in YAML's flow style."""
    text = folder / "text.md"
    text.write_text("Every block has sixteen codes and one scale. " * 400)
    config = RUN.format(pattern=pattern, text=text, recipe=recipe, width=width, family=family)
    (folder / "run.yaml").write_text(config)
    assert main(["train", str(folder / "run.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"
