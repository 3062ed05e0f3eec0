"""What a run prints: lines in a pipe, a bar on a terminal."""

import io
from pathlib import Path

from rich.console import Console

from fourbits.linear.summary import ConversionSummary
from fourbits.train.listener import ProgressPrinter, RunStart

START = RunStart(
    out=Path("runs/x"),
    step=0,
    num_steps=7,
    tokens_per_step=64,
    device="a CPU",
    backend="emulated",
    data="prose: 2.2 MB of text, 600,000 training tokens",
    conversion=ConversionSummary("bf16", "0", (), 1),
    compiles=True,
)


def step(number, **changes):
    record = {"step": number, "loss": 1.25, "lr": 1e-3, "grad_norm": 0.5, "skipped": False, "mfu": None}
    return {**record, "tokens_per_second": 1234.5, "step_seconds": 61.0, **changes}


def printed(records, terminal=False):
    stream = io.StringIO()
    printer = ProgressPrinter(Console(file=stream, force_terminal=terminal, width=120), log_interval=3)
    printer.begin(START)
    for record in records:
        printer.step(record)
    printer.end({})
    return stream.getvalue()


def test_a_pipe_gets_a_plain_line_per_interval_and_one_for_the_last_step():
    lines = printed([step(number) for number in range(1, 8)]).splitlines()
    assert [line.split("loss")[0].strip() for line in lines] == [f"training: step {n}/7" for n in (3, 6, 7)]
    assert lines[0].endswith("lr 1.00e-03  grad norm 0.5000  1,234 tokens/s  4:04 left")
    assert all(line.isprintable() and line.isascii() for line in lines)


def test_a_terminal_gets_a_bar_that_disappears():
    text = printed([step(number) for number in range(1, 8)], terminal=True)
    assert "7/7" in text
    assert "loss 1.2500" in text
    assert "training: step" not in text


def test_a_skipped_step_is_reported():
    assert "training: step 1: skipped, because values were not finite" in printed(
        [step(1, loss=None, skipped=True)]
    )
    assert "loss not finite" in printed([step(3, loss=None)])


def test_utilization_is_shown_if_it_is_known():
    assert "1,234 tokens/s (MFU 41.0%)" in printed([step(3, mfu=0.41)])
