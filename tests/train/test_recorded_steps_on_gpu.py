"""On a GPU a recorded step's trace has kernels, its snapshot what the allocator did, and no bit changes."""

import gzip
import json
import os
import pickle
import signal
from dataclasses import replace

import pytest
import torch

from fourbits.model.presets import MODEL_PRESETS
from fourbits.settings import override
from fourbits.train.listener import RunListener
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.torchrun import timeless

pytestmark = pytest.mark.gpu


class AsksAt1(RunListener):
    """Sends SIGUSR2 when step 1 is logged, and once more when step 8 is."""

    def step(self, record):
        if record["step"] in (1, 8):
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.fixture(scope="module", params=[True, False], ids=["with graphs", "without graphs"])
def runs(request, config, data_cache, tmp_path_factory):
    """(whether CUDA graphs are replayed, a run that was left alone, the same run that was asked twice)"""
    folder = tmp_path_factory.mktemp("runs")
    tiny = replace(config, model=replace(MODEL_PRESETS["tiny"], vocab_size=config.model.vocab_size))
    tiny = override(tiny, {"train.device": "cuda", "train.seq_len": 64, "train.cuda_graph": request.param})
    run(tiny, folder / "plain", stop=StopRequest(), data_cache=data_cache)
    run(tiny, folder / "asked", listener=AsksAt1(), data_cache=data_cache)
    return request.param, folder / "plain", folder / "asked"


def recorded(out):
    """The folders of the recorded steps, in the order of the steps."""
    return sorted((out / "profiles").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))


def test_two_requests_change_no_bit(runs):
    _, plain, asked = runs
    assert timeless(asked) == timeless(plain)
    files = sorted(plain.glob("checkpoints/step_*/*.safetensors"))
    assert files
    assert all(each.read_bytes() == (asked / each.relative_to(plain)).read_bytes() for each in files)


def test_traces_have_kernels_and_a_step_that_captures_graphs_is_not_recorded(runs):
    graphs, _, asked = runs
    assert json.loads((asked / "manifest.json").read_text())["cuda_graph"]["used"] == graphs
    folders = recorded(asked)
    assert len(folders) == 2
    # step 2 captures; a number may be logged one step later
    assert int(folders[0].name.removeprefix("step_")) >= (3 if graphs else 2)
    for folder in folders:
        trace = json.loads(gzip.decompress((folder / "trace_rank0.json.gz").read_bytes()))
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        launches = [event["name"] for event in trace["traceEvents"] if "Launch" in event["name"]]
        assert len(kernels) > 50
        assert any("GraphLaunch" in name for name in launches) == graphs


def test_snapshots_are_loaded_with_pickle_and_recording_ends_with_them(runs):
    _, _, asked = runs
    for folder in recorded(asked):
        snapshot = pickle.loads((folder / "memory_rank0.pickle").read_bytes())
        assert snapshot["segments"]
        events = [event["action"] for trace in snapshot["device_traces"] for event in trace]
        assert "alloc" in events
    assert not any(torch.cuda.memory._snapshot().get("device_traces", []))  # pyright: ignore[reportPrivateUsage]
    assert "open it in https://pytorch.org/memory_viz" in (asked / "log.txt").read_text()
