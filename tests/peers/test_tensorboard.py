"""TensorBoard's own reader finds the numbers of metrics.jsonl, without steps that a kill made void."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.peers

from dataclasses import replace  # noqa: E402

from fourbits.train.sinks import SinkRun  # noqa: E402


def test_its_reader_finds_each_step_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from fourbits.train.tensorboard_sink import make

    run = SinkRun(tmp_path, 0, {})
    for begin, last in ((0, 5), (3, 7)):  # killed after step 5, resumed after step 3
        sink = make()
        sink.begin(replace(run, step=begin))
        for step in range(begin + 1, last + 1):
            sink.write(step, {"loss": 10.0 * begin + step})
        sink.end("finished")
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [
        *((step, float(step)) for step in (1, 2, 3)),
        *((step, 30.0 + step) for step in (4, 5, 6, 7)),
    ]


def test_a_killed_process_leaves_all_steps_it_wrote(tmp_path):
    """A resumed run writes only those after its checkpoint again."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code = (
        "import os, signal, sys; from pathlib import Path; from fourbits.train.sinks import SinkRun\n"
        "from fourbits.train.tensorboard_sink import make\n"
        "sink = make(); sink.begin(SinkRun(Path(sys.argv[1]), 0, {}, 'from-a-step-0'))\n"
        "for step in (1, 2, 3): sink.write(step, {'loss': float(step)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    found = reader.EventAccumulator(str(tmp_path / "tensorboard" / "from-a-step-0")).Reload().Scalars("loss")
    assert [event.step for event in found] == [1, 2, 3]
