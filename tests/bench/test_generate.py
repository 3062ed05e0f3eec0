"""The benchmark of generation measures what it says, beside transformers on the same weights."""

import json

import pytest
import torch

from fourbits.bench import generate, timing
from fourbits.model.presets import MODEL_PRESETS
from model.shapes import small_config

CPU = torch.device("cpu")


def fake_medians(functions, device, repeats, warm_up=0):
    """Calls each, and says that the first took a second and each further one two more."""
    for function in functions:
        function()
    return [1.0 + 2.0 * number for number in range(len(functions))]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(generate, "medians", fake_medians)
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
    assert [bar["seconds"] for bar in report["bars"]] == [1.0, 1.0, 3.0, 3.0, 1.0]  # a step: (3 - 1) / 2
    assert "first tokens equal to ours: 2 of 2" in lines
    own, theirs, step = report["bars"][2:]
    assert own["value"] == 6 / 3.0
    assert theirs["value"] == step["value"] == 1.0
    assert all(bar["value"] > 0 for bar in report["bars"])


@pytest.mark.parametrize(
    ("request_of", "message"),
    [({"preset": "2b"}, "--preset: must be one of"), ({"tokens": 0}, "--tokens: must be at least 1, got 0")],
)
def test_sizes_that_cannot_be_measured_are_refused(request_of, message):
    with pytest.raises(ValueError, match=message):
        generate.GenerateRequest(**request_of)


def test_more_tokens_than_the_model_reads_are_refused():
    with pytest.raises(ValueError, match="tiny reads at most 64 tokens, these need 72"):
        generate.bench_generate(CPU, generate.GenerateRequest(prompt=40, tokens=32))
