"""Models and loops that know nothing of this project: Hugging Face models from a config, and the examples."""

import importlib.util
import os
import shutil
import subprocess
import sys
from subprocess import PIPE
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fourbits.linear.convert import convert
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import set_step
from fourbits.linear.summary import ConversionSummary
from support.assertions import assert_same_bytes
from support.examples import EXAMPLES, example

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MAMBA: dict[str, Any] = {
    "hybrid_override_pattern": "M-M*-M-M-M*-M-M",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2))


def successors(rows: int = 2, length: int = 32) -> torch.Tensor:
    """Tokens of which each has one successor."""
    return torch.arange(rows * length).reshape(rows, length) * 5 % 64


def kept(summary: ConversionSummary) -> dict[str, str]:
    return {row.name: row.reason for row in summary.rows if not row.quantized}


def train(model: PreTrainedModel, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        set_step(model, step)
        loss = model(successors(), labels=successors()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def continuation(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Four greedy tokens after the prompt."""
    ones = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=ones, max_new_tokens=4, do_sample=False, pad_token_id=0)


def test_a_llama_converts_trains_saves_loads_and_generates(tmp_path):
    model = llama()
    summary = convert(model, "nvfp4")
    assert set(kept(summary).values()) == {"last 1 of 2 blocks", "output head or embedding"}
    losses = train(model, 10)
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(m, QuantizedLinear) for m in loaded.modules())
    convert(loaded, "nvfp4")
    prompt = successors()[:, :8]
    texts = [continuation(m.eval(), prompt) for m in (model, loaded)]
    assert texts[0].shape == (2, 12)
    assert torch.equal(*texts)
    with torch.no_grad():
        assert_same_bytes(loaded(prompt).logits, model(prompt).logits)


def test_a_model_from_a_checkpoint_on_the_meta_device_converts_before_its_weights_are_loaded(tmp_path):
    source = llama()
    source.save_pretrained(tmp_path)
    convert(source, "nvfp4-naive")
    with torch.device("meta"):
        model = llama()
    convert(model, "nvfp4-naive")
    model.load_state_dict(source.state_dict(), strict=True, assign=True)
    model.model.rotary_emb = source.model.rotary_emb  # its buffers are no part of the state_dict
    assert_same_bytes(model(successors()).logits, source(successors()).logits)


def test_a_qwen_with_tied_embeddings_keeps_its_head():
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=4, tie_word_embeddings=True))
    listed = kept(convert(model, "nvfp4"))
    assert listed.pop("lm_head") == "weight is tied to another module"
    assert len(listed) == 7
    assert set(listed.values()) == {"last 1 of 4 blocks"}
    losses = train(model, 4)
    assert losses[-1] < losses[0]


def test_a_hybrid_keeps_embedding_head_norms_convolutions_and_scan(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = NemotronHConfig(**SIZES, **MAMBA)
    model = NemotronHForCausalLM(config)
    summary = convert(model, "nvfp4")
    blocks = len(model.model.layers)
    listed = kept(summary)
    assert listed.pop("lm_head") == "output head or embedding"
    assert set(listed.values()) == {f"last 2 of {blocks} blocks"}
    padded = [row.reason for row in summary.rows if row.name.endswith("layers.0.mixer.in_proj")]
    assert padded == ["recipe nvfp4; 196x32 is padded to multiples of 16"]
    quantized = {name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    projections = {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    assert quantized == projections
    assert isinstance(model.get_input_embeddings(), nn.Embedding)


def test_the_plain_loop_learns_and_its_loss_does_not_depend_on_the_number_of_micro_batches():
    """With one micro-batch or two the noise is the same; amax, and with it scales, may differ."""
    plain = example("01_plain_loop")
    losses = plain.main(steps=8, micro_batches=2)
    assert losses[-1] < 0.5 * losses[0]
    assert plain.main(steps=1, micro_batches=1)[0] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_the_hugging_face_trainer_runs_with_a_callback_saves_what_loads_and_resumes(tmp_path):
    module = example("02_hf_trainer")
    losses = module.main(str(tmp_path))
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    LlamaForCausalLM.from_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-5")
    assert module.main(str(tmp_path)) == losses


def test_accelerate_runs_and_continues_with_equal_losses(tmp_path):
    module = example("05_accelerate")
    losses = module.main(str(tmp_path / "whole"), steps=4)
    assert losses[-1] < losses[0]
    parts = [module.main(str(tmp_path / "parts"), steps=steps) for steps in (2, 4, 4)]
    assert [*parts[0], *parts[1]] == losses
    assert parts[2] == []


def test_fsdp2_ddp_and_accelerate_run_on_two_processes():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    running = [
        subprocess.Popen([*launch, name], stdout=PIPE, stderr=PIPE, text=True, cwd=EXAMPLES, env=environment)
        for name in ("03_fsdp2.py", "04_ddp.py", "05_accelerate.py")
    ]
    for process in running:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        first, last = (
            float(word) for word in output.rpartition("loss ")[2].removeprefix("of rank 0:").split("->")
        )
        assert last < 0.2 * first


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_under_60_lines_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert path.name in text.splitlines()[0]
