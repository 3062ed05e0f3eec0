"""What training prints: losses and gradient norms of a few steps of the preset `tiny`, in every recipe."""

import contextlib
import io
import json
import tempfile
from pathlib import Path

import fourbits as fb
from fourbits.cli.main import main
from golden.inputs import raw

STEPS = 5
_SETTINGS = {
    "train.steps": STEPS,
    "train.micro_batch_size": 2,
    "train.gradient_accumulation": 2,
    "train.seq_len": 256,
    "train.validation_samples": 2,
    "train.compile": "none",
    "train.threads": 2,
    "data.vocab_size": 384,
    "model.vocab_size": 384,
}
#: what says how fast the machine is, and what is in the key
_LEFT_OUT = ("tokens_per_second", "step_seconds", "data_seconds", "mfu", "memory_bytes", "step", "kind")
_WORDS = (
    "the",
    "block",
    "scale",
    "of",
    "a",
    "tensor",
    "is",
    "its",
    "amax",
    "over",
    "six",
    "and",
    "every",
    "code",
)


def entries(device: str) -> dict[str, str]:
    """Every number of every step and validation but those that say how fast the machine is."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(" ".join(_WORDS[int(word) % len(_WORDS)] for word in raw(20_000, "text")))
        for recipe in fb.list_recipes():
            for record in _run(recipe, text, Path(folder, recipe), device):
                where = f"losses/{recipe}/step {record['step']} {record['kind']}"
                numbers = {key: value for key, value in sorted(record.items()) if key not in _LEFT_OUT}
                found[where] = " ".join(f"{key} {value!r}" for key, value in numbers.items())
    return found


def _run(recipe: str, text: Path, out: Path, device: str) -> list[dict[str, object]]:
    """The metrics of one run."""
    settings = {**_SETTINGS, "data.paths": f"[{text}]", "train.device": device}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["train", "tiny", "--out", str(out), "--recipe", recipe, *options])
    if code:
        raise RuntimeError(f"fourbits train tiny --recipe {recipe} exited with {code}:\n{said.getvalue()}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
