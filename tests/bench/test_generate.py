"""The benchmark of generation measures what it says, beside transformers on the same weights."""

import json

import pytest
import torch

from fourbits.bench import generate, timing
from fourbits.model.presets import MODEL_PRESETS
from model.shapes import small_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(timing._COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(generate, "product_rate", lambda device: 1e12)
    monkeypatch.setattr(generate, "_STEPS", 2)
    monkeypatch.setattr(generate, "_CALLS", 1)
    monkeypatch.setitem(MODEL_PRESETS, "tiny", small_config("M-*-", max_seq_len=64))


def test_both_generate_the_same_tokens_and_every_part_is_measured():
    lines = []
    request = generate.GenerateRequest(batch=2, prompt=5, tokens=3)
    report = json.loads(json.dumps(generate.bench_generate(CPU, request, lines.append).to_dict()))
    parts = ["prefill", "step", "3 tokens", "3 tokens", "step"]
    assert [bar["name"].rsplit(", ", 1)[1] for bar in report["bars"]] == parts
    assert all(bar["seconds"] > 0 and bar["value"] > 0 for bar in report["bars"])
    assert "first tokens equal to ours: 2 of 2" in lines
    own, theirs = report["bars"][2:4]
    assert own["value"] == pytest.approx(6 / own["seconds"])
    assert theirs["value"] == pytest.approx(theirs["seconds"] / own["seconds"])


@pytest.mark.parametrize(
    ("request_of", "message"),
    [({"preset": "2b"}, "--preset: must be of"), ({"tokens": 0}, "--tokens: must be at least 1, got 0")],
)
def test_sizes_that_cannot_be_measured_are_refused(request_of, message):
    with pytest.raises(ValueError, match=message):
        generate.GenerateRequest(**request_of)


def test_more_tokens_than_the_model_reads_are_refused():
    with pytest.raises(ValueError, match="tiny reads at most 64 tokens, these need 72"):
        generate.bench_generate(CPU, generate.GenerateRequest(prompt=40, tokens=32))
